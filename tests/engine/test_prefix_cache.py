"""The radix tree against a list of everything that was put into it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.engine.prefix_cache import Entry, PrefixCache
from agentjax.engine.store import Snapshot, Stored

GRID = 4
Ids = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)


def entry(length: int, *, fresh: bool = True, version: int = 0) -> Entry:
  return Entry(Snapshot(Stored(()), (), length, version), None, fresh)


def array(ids) -> np.ndarray:
  return np.asarray(ids, np.int32)


def tree(**options) -> PrefixCache:
  made = PrefixCache(GRID, **{"any_history": False, "attention_only": False, **options})
  made.clear(0)
  return made


@given(
  st.lists(st.tuples(Ids, st.booleans()), max_size=12),
  st.lists(Ids, min_size=1, max_size=6),
  st.booleans(),
  st.booleans(),
)
def test_it_finds_the_longest_beginning_that_may_be_used(inserts, queries, any_history, attends):
  cache, known = tree(any_history=any_history, attention_only=attends), {}
  for ids, fresh in inserts:
    cache.insert(array(ids), entry(len(ids), fresh=fresh))
    known[ids] = known.get(ids, False) or fresh
  assert len(cache) == len(known)
  for query in queries:
    lengths = [0]
    for ids, fresh in known.items():
      if not (fresh or any_history):
        continue
      common = next(
        (i for i, (a, b) in enumerate(zip(ids, query, strict=False)) if a != b),
        min(len(ids), len(query)),
      )
      whole = common == len(ids)
      if whole and (any_history or common == len(query) or common % GRID == 0):
        lengths.append(common)
      if attends:
        part = min(common, len(query) - 1)
        lengths.append(part if any_history else part - part % GRID)
    found = cache.find(array(query))
    assert (0 if found is None else found[0]) == max(lengths)
    if found is not None:
      assert found[1].snapshot.length >= found[0]


@given(st.lists(Ids, max_size=12, unique=True), st.integers(0, 12))
def test_what_was_not_used_for_longest_goes_first_and_nothing_stays_behind(inserts, evictions):
  cache = tree(any_history=True)
  for ids in inserts:
    cache.insert(array(ids), entry(len(ids)))
  for ids in inserts[::-1]:
    cache.find(array(ids))  # what was put in last is now the longest unused
  evictions = min(evictions, len(inserts))
  assert all(cache.evict() for _ in range(evictions))
  left = len(inserts) - evictions
  for i, ids in enumerate(inserts):
    found = cache.find(array(ids))
    assert (found is not None and found[0] == len(ids)) == (i < left)
  assert all(cache.evict() for _ in range(left))
  assert not cache.evict()
  assert not cache._root.children


def test_weights_of_another_version_are_never_served():
  cache = tree()
  cache.insert(array([1, 2]), entry(2, version=0))
  cache.clear(1)
  assert cache.find(array([1, 2])) is None
  cache.insert(array([1, 2]), entry(2, version=0))
  assert cache.find(array([1, 2])) is None
  cache.insert(array([1, 2]), entry(2, version=1))
  assert cache.find(array([1, 2]))[0] == 2


@pytest.mark.parametrize("fresh", [True, False])
def test_a_fresh_context_takes_the_place_of_another_and_not_the_other_way_round(fresh):
  cache = tree(any_history=True)
  first, second = entry(2, fresh=not fresh), entry(2, fresh=fresh)
  cache.insert(array([1, 2]), first)
  cache.insert(array([1, 2]), second)
  assert cache.find(array([1, 2]))[1] is (second if fresh else first)
  assert len(cache) == 1
