"""Checks of what seats write: conjectures on small cases, solutions, generators of inputs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from agentjax.adapters.unit_tests.boxed.plain import NotPlain, decode
from agentjax.adapters.unit_tests.scorer import UnitTests
from agentjax.recipes.grandcode.inputs import Arguments, Domain, Problem, distinct
from agentjax.recipes.grandcode.pool import (
  BROKEN,
  LATE,
  PoolTest,
  TestMaker,
  expect_the_vote,
  failed_by,
  text_of_value,
  texts_of,
)
from agentjax.recipes.grandcode.rewards import Outcome
from agentjax.recipes.grandcode.runner import Runner

HOLDS = "holds"  # the function that a conjecture defines
_SHOWN = 200  # characters of a value in a message


@dataclasses.dataclass(frozen=True)
class SmallCase:
  """A small input, its right result, and a wrong one that looks alike."""

  arguments: Arguments
  result: Any
  decoy: Any


@dataclasses.dataclass(frozen=True)
class Conjecture:
  """How a conjecture did.

  Attributes:
    passed, checks: right results that it accepts, and how many there are.
    caught, decoys: wrong results that it refuses, and how many there are.
    counterexample: in words, for its author; "" where it held everywhere.
  """

  passed: int
  checks: int
  caught: int
  decoys: int
  counterexample: str


async def small_cases(
  problem: Problem, runner: Runner, reference: str | None, *, count: int, seed: int
) -> list[SmallCase]:
  """Small inputs with right results: the examples, and with a reference further inputs.

  Without a reference (test time) only the examples are known to be right.
  """
  known = [(e.arguments, e.expected) for e in problem.examples]
  if reference is not None:
    draw, domain = random.Random(f"cases {seed} {problem.id}"), Domain(problem)
    near = (domain.near(draw, changes=draw.randint(1, 3)) for _ in range(4 * count))
    shown = {repr(e.arguments) for e in problem.examples}
    inputs = [a for a in distinct(near) if repr(a) not in shown and domain.refusal(a) is None]
    inputs = inputs[: max(0, count - len(known))]
    for arguments, answer in zip(
      inputs, await runner.of(problem.function)(reference, inputs), strict=True
    ):
      if answer.answer is not None and "value" in answer.answer:
        try:
          known.append((arguments, decode(answer.answer["value"])))
        except NotPlain:
          continue
  results = [result for _, result in known]
  return [SmallCase(a, r, _decoy(r, results)) for a, r in known[:count]]


def _decoy(right: Any, others: Sequence[Any]) -> Any:
  """A wrong result of the same type: another case's where one differs, else a changed one."""
  for other in others:
    if type(other) is type(right) and other != right:
      return other
  if isinstance(right, bool):
    return not right
  if isinstance(right, int):
    return right + 1
  if isinstance(right, float):
    return right + 1 if right + 1 != right else 0.0  # infinite, or too large to grow by 1
  if isinstance(right, str):
    return right + "x"
  if isinstance(right, bytes):
    return right + b"x"
  if isinstance(right, list | tuple):
    return type(right)([*right, *(right[:1] or [0])])
  if isinstance(right, set | frozenset | dict):
    few = sorted(right, key=repr)[1:]
    if isinstance(right, dict):
      return {key: right[key] for key in few} if right else {0: 0}
    return type(right)(few if right else (0,))
  return 0 if right is None else None


async def check_conjecture(code: str | None, cases: Sequence[SmallCase], runner: Runner
) -> Conjecture:  # fmt: skip
  """Runs ``holds(arguments, result)`` on right results and on wrong ones."""
  if code is None or not cases:
    reason = "" if cases else "no small case is known"
    return Conjecture(0, len(cases), 0, len(cases), reason or "there is no code block")
  ask = runner.of(HOLDS)
  right = await ask(code, [(list(c.arguments), c.result) for c in cases])
  wrong = await ask(code, [(list(c.arguments), c.decoy) for c in cases])
  holds = [_truth(a) for a in right]
  counter = next((c for c, held in zip(cases, holds, strict=True) if held is not True), None)
  words = ""
  if counter is not None:
    words = f"for the input ({_written(*counter.arguments)}) the result is "
    words += _written(counter.result)
  return Conjecture(
    sum(held is True for held in holds),
    len(cases),
    sum(_truth(a) is False for a in wrong),
    len(cases),
    words,
  )


def _written(*values: Any) -> str:
  """The beginning of values as Python writes them."""
  try:
    return ", ".join(map(repr, values))[:_SHOWN]
  except ValueError:
    return "a number of too many digits to be written"


def _truth(answer: Any) -> bool | None:
  """True or False as the conjecture said it; None for anything else."""
  value = (answer.answer or {}).get("value") if answer.asked else None
  return value if isinstance(value, bool) else None


@dataclasses.dataclass(frozen=True)
class Judgement:
  """How a solution did: its outcome, and the first failure in words for its author."""

  outcome: Outcome
  failure: str = ""


async def judge_examples(code: str | None, problem: Problem, runner: Runner) -> Judgement:
  """A solution against the examples that everybody sees."""
  shown = [PoolTest(e.arguments, "difference", text_of_value(e.expected)) for e in problem.examples]
  return await judge_tests(code, problem, shown, runner, shown=True)


async def judge_tests(
  code: str | None,
  problem: Problem,
  tests: Sequence[PoolTest],
  runner: Runner,
  *,
  shown: bool = False,
) -> Judgement:
  """A solution against tests with expected answers; those without are left out.

  Args:
    code: None is no code at all.
    problem: whose function is called.
    tests: of the pool; an empty one accepts everything.
    runner: of the sandbox.
    shown: whether the author may see the inputs.
  """
  if code is None:
    return Judgement("broken", "there is no code block")
  known = [t for t in tests if t.expected is not None]
  if not known:
    return Judgement("right")
  texts = texts_of(await runner.of(problem.function)(code, [t.arguments for t in known]))
  failed = failed_by(known, texts)
  if not failed:
    return Judgement("right")
  test, text = known[failed[0]], texts[failed[0]]
  outcome: Outcome = {LATE: "late", BROKEN: "broken"}.get(text or "", "wrong")  # type: ignore[assignment]
  said = f"for the input ({_written(*test.arguments)}) the answer was {str(text)[:_SHOWN]}"
  expected = str(test.expected)[:_SHOWN]
  return Judgement(outcome, f"{said}, not {expected}" if shown else "a hidden test fails")


async def judge_own(code: str, tests: UnitTests, runner: Runner) -> Judgement:
  """A solution against the task's own tests."""
  verdict = await runner.verify(code, tests)
  failed = [case for case in verdict.cases if not case.passed]
  if not failed:
    return Judgement("right")
  late = any("time ran out" in case.reason for case in failed)
  return Judgement("late" if late else "wrong", "a hidden test fails")


@dataclasses.dataclass(frozen=True)
class Generated:
  """What a test generator's program gave.

  Attributes:
    tests: valid inputs that separate candidates, with the reference's answers.
    valid, proposed: inputs.
    separated, wrong: candidates that a test separates from the reference, and all.
    refusal: why the first invalid input is none; "" where all are valid.
  """

  tests: tuple[PoolTest, ...]
  valid: int
  proposed: int
  separated: int
  wrong: int
  refusal: str


async def run_generator(
  code: str | None,
  problem: Problem,
  candidates: Sequence[str],
  maker: TestMaker,
  runner: Runner,
  *,
  seed: int,
) -> Generated:
  """Inputs of a generator, and what they separate.

  Args:
    code: defines ``inputs(seed)``, a list of tuples of arguments.
    problem: that they are inputs of.
    candidates: wrong ones, or those that are not known to be right.
    maker: of the problem, with a reference where one is known.
    runner: of the sandbox.
    seed: of the generator.
  """
  found = [] if code is None else await runner.inputs(code, seed)
  domain, shown = Domain(problem), {repr(e.arguments) for e in problem.examples}
  reasons = [domain.refusal(a) for a in found]
  valid = [tuple(a) for a, why in zip(found, reasons, strict=True) if why is None]
  new = [a for a in distinct(valid) if repr(a) not in shown]
  tests = await maker.by_difference(candidates, new) if new else []
  separated, ask = 0, runner.of(problem.function)
  if tests and maker.reference is None:
    tests, _ = await expect_the_vote(tests, candidates, ask)
  for candidate in candidates if tests else ():
    texts = texts_of(await ask(candidate, [t.arguments for t in tests]))
    separated += bool(failed_by(tests, texts))
  refusal = next((why for why in reasons if why is not None), "" if found else "no list of inputs")
  return Generated(
    tuple(tests), len(valid), max(len(found), 1), separated, len(candidates), refusal
  )
