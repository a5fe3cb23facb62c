"""The radix tree against a list of everything that was put into it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.engine.prefix_cache import Entry, ImageKeys, PrefixCache, token_ids
from agentjax.engine.store import Snapshot, Stored

GRID = 4
Ids = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)


def entry(length: int, *, fresh: bool = True, version: int = 0) -> Entry:
  return Entry(Snapshot(Stored(), (), length, version), None, fresh)


def anywhere(snapshot: Snapshot, tokens: int) -> bool:
  return True


def array(ids) -> np.ndarray:
  return np.asarray(ids, np.int32)


def tree(**options) -> PrefixCache:
  made = PrefixCache(GRID, **{"any_history": False, "may_cut": None, **options})
  made.clear(0)
  return made


@given(
  st.lists(st.tuples(Ids, st.booleans()), max_size=12),
  st.lists(Ids, min_size=1, max_size=6),
  st.booleans(),
  st.booleans(),
)
def test_it_finds_the_longest_beginning_that_may_be_used(inserts, queries, any_history, attends):
  cache, known = tree(any_history=any_history, may_cut=anywhere if attends else None), {}
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


@st.composite
def requests(draw):
  """Ids, and images at some of their places."""
  ids = draw(Ids)
  places = draw(st.sets(st.integers(0, len(ids) - 1), max_size=3))
  return ids, tuple((place, draw(st.sampled_from("ab"))) for place in sorted(places))


@given(requests(), requests())
def test_two_requests_share_what_stands_before_another_token_or_image(first, second):
  keys = ImageKeys()
  cache = tree(any_history=True, may_cut=anywhere)
  (ids, images), (others, other_images) = first, second
  cache.insert(keys.of(array(ids), images), entry(len(ids)))
  over_ids = next(
    (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
    min(len(ids), len(others)),
  )
  differing = set(images) ^ set(other_images)
  over_images = min((place for place, _ in differing), default=len(others))
  shared = min(over_ids, over_images)
  found = cache.find(keys.of(array(others), other_images))
  # A whole entry serves all it has; of a longer one never the last token that is asked for.
  usable = shared if shared == len(ids) else min(shared, len(others) - 1)
  assert (0 if found is None else found[0]) == usable


@given(requests())
def test_keys_hold_the_ids(asked):
  ids, images = asked
  keys = ImageKeys().of(array(ids), images)
  found = token_ids(keys)
  assert found.dtype == np.int32 and found.tolist() == list(ids)
  assert (keys is not found) == bool(images)


@pytest.mark.parametrize("images", [((3, "a"),), ((-1, "a"),), ((0, "a"), (0, "b"))])
def test_images_stand_at_places_of_the_request(images):
  with pytest.raises(ValueError, match="of 3 tokens; allowed: places of 0 to 2, each once"):
    ImageKeys().of(array([1, 2, 0]), images)
