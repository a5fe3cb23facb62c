"""Hostile candidates and generators in real sandboxes: each fails alone."""

import asyncio
import sys

import pytest

from agentjax.adapters.unit_tests.canaries import canaries
from agentjax.adapters.unit_tests.scorer import UnitTests
from agentjax.recipes.grandcode.checks import SmallCase, check_conjecture, judge_tests
from agentjax.recipes.grandcode.pool import BROKEN, LATE, OBJECT, PoolTest, texts_of
from agentjax.recipes.grandcode.runner import open_runner
from agentjax.recipes.grandcode.wrong import wrong_candidates
from tests.recipes.grandcode.local import problem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


# Writes to the pipe of its answers, the last one that was opened.
_FORGED = """
import os
def f(x):
  for fd in range(64, 2, -1):
    try:
      os.write(fd, b'{"value": {}}\\n')
      os._exit(0)
    except OSError:
      pass
"""


@pytest.fixture(scope="module")
def runner():
  made = open_runner(cpu_seconds=1)
  yield made
  asyncio.run(made.close())


@pytest.mark.parametrize(
  ("code", "texts"),
  [
    ("def f(x):\n  return [x, 1 / x]", ["value [2, 0.5]", "error ZeroDivisionError"]),
    ("def f(x):\n  while x: pass\n  return 0", [LATE, None]),
    ("while True: pass", [LATE, None]),
    ("def f(x:", [BROKEN, None]),
    ("def g(x): return x", ["error NameError"] * 2),
    (
      "print('{\"0\": 1}' * 999)\ndef f(x):\n  print('garbage')\n  return x",
      ["value 2", "value 0"],
    ),
    ("import os\ndef f(x):\n  os._exit(0)", [BROKEN, BROKEN]),
    ("def f(x):\n  return f(x)", ["error RecursionError"] * 2),
    ("def f(x):\n  return object()", [OBJECT] * 2),
    ("def f(x):\n  yield from range(x)", ["value [0, 1]", "value []"]),
    ("x = '\0'\ndef f(x): return x", [BROKEN, None]),
    (_FORGED, [OBJECT] * 2),
  ],
)
def test_what_a_candidate_does_is_known_call_by_call(runner, code, texts):
  assert texts_of(asyncio.run(runner.of("f")(code, [(2,), (0,)]))) == texts


@pytest.mark.parametrize(
  ("code", "inputs"),
  [
    ("def inputs(seed): return [(seed,), [2, 'x']]", [(4,), [2, "x"]]),
    ("def inputs(seed): return [(i,) for i in range(10**4)]", [(i,) for i in range(64)]),
    ("def inputs(seed):\n  while True: yield 1", []),
    ("def inputs(seed): raise SystemExit", []),
    ("def inputs(seed): return {'a': 1}", []),
    ("garbage", []),
  ],
)
def test_a_generator_gives_a_bounded_list_or_nothing(runner, code, inputs):
  assert asyncio.run(runner.inputs(code, 4)) == inputs


def test_a_late_answer_is_told_from_a_wrong_one(runner):
  given = problem(((2,), 4))
  tests = [PoolTest((n,), "size", f"value {n * n}") for n in (1, 2)]
  cases = {
    "def f(x): return x * x": "right",
    "def f(x): return x": "wrong",
    "def f(x):\n  while x > 1: pass\n  return x": "late",
    "def f(": "broken",
  }
  for code, outcome in cases.items():
    assert asyncio.run(judge_tests(code, given, tests, runner)).outcome == outcome
  assert asyncio.run(runner.verify("def f(x): return 4", UnitTests(
    "assert f(2) == 4\nassert f(3) == 9", {"solution": ("f",)}))).passed == 1  # fmt: skip


def test_a_conjecture_that_equals_everything_is_not_believed(runner):
  cases = [SmallCase(([1, 2],), 2, 1), SmallCase(([5],), 5, 6)]
  tricks = "class Yes:\n  def __bool__(self): return True\n  def __eq__(self, o): return True\n"
  found = asyncio.run(
    check_conjecture(tricks + "def holds(arguments, result): return Yes()", cases, runner)
  )
  assert (found.passed, found.caught) == (0, 0)
  found = asyncio.run(check_conjecture("def holds(a, r): return r == max(a[0])", cases, runner))
  assert (found.passed, found.caught, found.counterexample) == (2, 2, "")


@pytest.mark.parametrize("name", sorted(canaries(["f"])))
def test_a_program_that_tries_to_be_paid_without_work_is_not_right(runner, name):
  given = problem(((2,), 4))
  tests = [PoolTest((n,), "difference", f"value {n * n}") for n in (2, 3)]
  found = asyncio.run(judge_tests(canaries(["f"])[name], given, tests, runner))
  assert found.outcome != "right"


def test_a_slow_twin_is_right_on_small_inputs_and_late_on_large_ones(runner):
  source = "def f(xs):\n  return sum(xs)\n"
  *mutants, slow = wrong_candidates(source, "f", most=3, seed=0)
  assert slow.slow and not any(one.slow for one in mutants)
  assert texts_of(asyncio.run(runner.of("f")(slow.code, [([1, 2],)]))) == ["value 3"]
  assert texts_of(asyncio.run(runner.of("f")(slow.code, [([1] * 30_000,)]))) == [LATE]


def test_each_call_tells_its_own_cpu_time(runner):
  code = "import time\ndef f(x):\n  while time.process_time() < x: pass\n  return x"
  long, short = asyncio.run(runner.of("f")(code, [(0.4,), (0,)]))
  assert short.seconds < 0.4 <= long.seconds < 2
