"""Each kind of test separates the wrong programs that it is for, and counts them right."""

import asyncio

import pytest

from agentjax.adapters.unit_tests.scorer import CallAnswer
from agentjax.config import ConfigError
from agentjax.recipes.grandcode.inputs import Domain
from agentjax.recipes.grandcode.pool import (
  LATE,
  OBJECT,
  PoolConfig,
  TestMaker,
  answer_text,
  choose_separating,
  count_separations,
  expect_the_vote,
  failed_by,
  text_of_value,
  texts_of,
  vote,
)
from tests.recipes.grandcode.local import ask_here, problem

_LARGEST = problem((([3, 1, 2],), 3), (([5, 4],), 5), (([-7, 2],), 2))
_RIGHT = "def f(xs):\n  return max(xs, default=0)"
_FIRST = "def f(xs):\n  return xs[0] if len(xs) > 2 else max(xs, default=0)"
_POSITIVE = "def f(xs):\n  return max([0, *xs])"
_RARE = "def f(xs):\n  return max(xs, default=0) + (len(xs) == 7)"
_SLOW = "def f(xs):\n  if len(xs) > 1000: raise Hangs\n  return max(xs, default=0)"


def _maker(reference=_RIGHT, ask=None, **config):
  ask = ask or ask_here("f")
  return TestMaker(Domain(_LARGEST), ask, PoolConfig(**config), reference=reference)


def _fails(tests, code):
  texts = texts_of(asyncio.run(ask_here("f")(code, [t.arguments for t in tests])))
  return bool(failed_by(tests, texts))


def test_differences_keep_few_inputs_that_separate_all_that_can_be_separated():
  tests = asyncio.run(_maker().by_difference([_FIRST, _POSITIVE, _RIGHT]))
  assert 1 <= len(tests) <= 3
  assert [_fails(tests, code) for code in (_FIRST, _POSITIVE, _RIGHT)] == [True, True, False]
  assert all(t.kind == "difference" and t.expected.startswith("value ") for t in tests)


def test_candidates_alike_give_no_test():
  assert asyncio.run(_maker().by_difference([_RIGHT, _SLOW])) == []
  assert asyncio.run(_maker(reference=None).by_difference([_RIGHT])) == []


def test_an_empty_pool_of_candidates_or_inputs_asks_nobody():
  calls = []
  maker = _maker(ask=ask_here("f", calls))
  assert asyncio.run(maker.by_difference([])) == []
  assert asyncio.run(maker.by_difference([_FIRST], [])) == []
  assert calls == []
  assert failed_by([], []) == [] and vote([]).winner is None
  assert asyncio.run(expect_the_vote([], [], ask_here("f"))) == ([], None)


def test_inputs_on_which_the_reference_fails_are_not_valid():
  reference = "def f(xs):\n  assert len(xs) % 2\n  return max(xs)"
  tests = asyncio.run(_maker(reference).by_difference([_FIRST, _POSITIVE]))
  assert tests and all(len(t.arguments[0]) % 2 for t in tests)


def test_without_a_reference_errors_of_all_are_invalid_inputs():
  partial = "def f(xs):\n  return max(xs)"  # an empty list is an error here, and in this twin
  other = "def f(xs):\n  return sorted(xs)[-1]"
  tests = asyncio.run(_maker(reference=None).by_difference([partial, other]))
  assert tests == []


def test_an_attack_finds_what_differences_of_few_inputs_miss():
  few = asyncio.run(_maker(proposals=4).by_difference([_RARE]))
  found = asyncio.run(_maker(proposals=4, rounds=6, batch=60).by_attack(_RARE))
  assert few == [] and found is not None
  assert len(found.arguments[0]) == 7 and _fails([found], _RARE)
  assert asyncio.run(_maker().by_attack(_RIGHT)) is None


def test_an_attack_begins_with_what_caught_others():
  found = asyncio.run(_maker(rounds=1, batch=1).by_attack(_RARE, [([1] * 7,)]))
  assert found.arguments == ([1] * 7,)
  with pytest.raises(ValueError, match="no reference|there is none"):
    asyncio.run(_maker(reference=None).by_attack(_RARE))


def test_large_inputs_catch_slow_programs_alone():
  maker = _maker(sizes=(100, 2_000, 5_000))
  tests = asyncio.run(maker.by_size([_SLOW, _RIGHT]))
  assert [len(t.arguments[0]) for t in tests] == [2_000, 5_000]
  assert _fails(tests, _SLOW) and not _fails(tests, _RIGHT)


def test_sizes_that_the_reference_cannot_do_are_no_tests():
  assert asyncio.run(_maker(_SLOW, sizes=(100, 2_000)).by_size([_SLOW, _POSITIVE])) == []


def test_a_call_that_was_not_made_separates_nothing():
  first = "def f(xs):\n  raise Hangs"
  inputs = [([3, 1],), ([9, 8, 7],)]
  texts = texts_of(asyncio.run(ask_here("f")(first, inputs)))
  assert texts == [LATE, None]
  table = list(zip(texts, ["value 3", "value 9"], strict=True))
  assert choose_separating(table, 5) == [(0, {(0, 1)})]


def test_inputs_are_chosen_that_separate_pairs_left_by_others():
  table = [["a", "a", "b"], ["a", "b", "c"], ["a", "b", "b"], [None, "b", "c"]]
  assert [i for i, _ in choose_separating(table, 9)] == [1]
  assert [i for i, _ in choose_separating([table[0], table[2]], 9)] == [0, 1]
  assert [i for i, _ in choose_separating([table[0], table[2]], 1)] == [0]


@pytest.mark.parametrize(
  ("one", "other", "equal"),
  [
    (2, 2.0, True),
    (True, 1, True),
    (0.1 + 0.2, 0.3, True),
    (0.3, 0.3001, False),
    ({1, 2}, {2, 1}, True),
    ({"a": [1]}, {"a": [1.0]}, True),
    ([1], (1,), False),
    (2**70, 2**70 + 1, False),
    ("1", 1, False),
  ],
)
def test_answers_are_compared_as_python_compares_them(one, other, equal):
  assert (text_of_value(one) == text_of_value(other)) is equal


def test_garbage_in_the_place_of_an_answer_is_known_as_such():
  assert answer_text(CallAnswer({"value": [1], "x": 2})) == "value [1]"
  assert answer_text(CallAnswer({"error": []})) == OBJECT
  assert answer_text(CallAnswer({"what": 1})) == OBJECT
  assert answer_text(CallAnswer(None, "it ended early")) == "broken"
  for forged in ({}, {"a": 1, "b": 2}, {"set": 5}, [{"dict": None}]):  # none of ``boxed.plain``
    assert answer_text(CallAnswer({"value": forged})) == OBJECT


def test_the_vote_goes_to_the_answers_of_most_and_not_to_programs_without_any():
  found = vote([["value 1", "value 2"], ["late", None], ["value 1", "value 3"],
                ["value 1", "value 3"], ["late", None], ["late", None]])  # fmt: skip
  assert found.winner == 2 and found.groups == ((2, 3), (0,))


def test_expected_answers_of_the_vote_are_values():
  tests = asyncio.run(_maker(reference=None).by_difference([_RIGHT, _RIGHT + "\n", _FIRST]))
  settled, winner = asyncio.run(
    expect_the_vote(tests, [_FIRST, _RIGHT, _RIGHT + "\n"], ask_here("f"))
  )
  assert winner == 1 and _fails(settled, _FIRST) and not _fails(settled, _RIGHT)


def test_wrong_candidates_are_counted_by_kind_and_by_no_other():
  found = count_separations(
    {
      "a": frozenset({"difference", "attack"}),
      "b": frozenset({"size"}),
      "c": frozenset(),
      "d": frozenset({"attack"}),
    }
  )
  assert found.candidates == 4 and found.any == 3
  assert found.by_kind == {"difference": 1, "attack": 2, "size": 1}
  assert found.only == {"difference": 0, "attack": 1, "size": 1}


def test_sizes_must_ascend():
  with pytest.raises(ConfigError, match=r"pool\.sizes=\(9, 3\); allowed: ascending"):
    PoolConfig(sizes=(9, 3)).validate()
