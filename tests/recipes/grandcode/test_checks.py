"""Conjectures are checked on right results and on wrong ones that look alike."""

import asyncio

import pytest

from agentjax.recipes.grandcode.checks import check_conjecture, small_cases
from tests.recipes.grandcode.local import LocalRunner, problem


@pytest.mark.parametrize(
  "result",
  [
    None,
    True,
    7,
    1.5,
    1e300,
    float("inf"),
    "a",
    b"a",
    [],
    [1],
    (),
    set(),
    {1},
    frozenset(),
    {},
    {1: 2},
    {1: 2, 3: 4},
  ],
)
def test_a_wrong_result_differs_and_only_the_type_does_not_tell_it(result):
  given = problem(((2,), result))
  (case,) = asyncio.run(small_cases(given, LocalRunner(), None, count=8, seed=0))
  assert case.decoy != result
  assert type(case.decoy) is type(result) or result is None


def test_a_result_of_too_many_digits_is_a_counterexample_in_words():
  runner, reference = LocalRunner(), "def f(x):\n  return 10**5000 + x"
  given = problem(((2,), 10**5000 + 2))
  cases = asyncio.run(small_cases(given, runner, reference, count=4, seed=0))
  code = "def holds(arguments, result): return False"
  found = asyncio.run(check_conjecture(code, cases, runner))
  assert "too many digits" in found.counterexample and found.caught == len(cases)
