"""Conjectures are checked on right results and on wrong ones that look alike."""

import asyncio

from agentjax.recipes.grandcode.checks import check_conjecture, small_cases
from tests.recipes.grandcode.local import LocalRunner, problem


def test_a_result_of_too_many_digits_is_a_counterexample_in_words():
  runner, reference = LocalRunner(), "def f(x):\n  return 10**5000 + x"
  given = problem(((2,), 10**5000 + 2))
  cases = asyncio.run(small_cases(given, runner, reference, count=4, seed=0))
  code = "def holds(arguments, result): return False"
  found = asyncio.run(check_conjecture(code, cases, runner))
  assert "too many digits" in found.counterexample and found.caught == len(cases)
