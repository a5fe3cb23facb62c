"""Which wrong programs the kinds of generated tests separate from the right one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from agentjax.adapters.unit_tests.scorer import UNIT_TESTS, UnitTests, VerifierFault
from agentjax.data.synthesis_folder import RowFile, fill, unreported
from agentjax.recipes.grandcode.checks import judge_examples, judge_own
from agentjax.recipes.grandcode.inputs import Domain, Problem, read_problem
from agentjax.recipes.grandcode.pool import (
  KINDS,
  Ask,
  Kind,
  PoolConfig,
  PoolTest,
  TestMaker,
  count_separations,
  failed_by,
  texts_of,
)
from agentjax.recipes.grandcode.runner import Runner
from agentjax.recipes.grandcode.wrong import Wrong, wrong_candidates
from agentjax.training.progress import print_line
from agentjax.trajectory.record import Task

ROWS = "tests.jsonl"


@dataclasses.dataclass(frozen=True)
class Found:
  """What generated tests did to the wrong programs of one task.

  Attributes:
    refused: wrong programs that fail the examples.
    own: names of the accepted ones that fail the task's own tests.
    caught: kinds of tests that separate each accepted one from the reference, by its name.
    tests: kept ones by kind, written as Python.
    slow: the slow twin among the accepted, or "".
  """

  refused: int
  own: Sequence[str]
  caught: Mapping[str, Sequence[Kind]]
  tests: Mapping[Kind, Sequence[str]]
  slow: str


async def separate(
  problem: Problem,
  reference: str,
  wrong: Sequence[Wrong],
  own: UnitTests,
  runner: Runner,
  config: PoolConfig,
) -> Found | None:
  """Generates all three kinds of tests; None if the reference fails the task's own tests.

  Raises:
    VerifierFault: a sandbox failed.
  """
  if (await judge_own(reference, own, runner)).outcome != "right":
    return None
  seen = [await judge_examples(one.code, problem, runner) for one in wrong]
  accepted = [one for one, found in zip(wrong, seen, strict=True) if found.outcome == "right"]
  verdicts = [await judge_own(one.code, own, runner) for one in accepted]
  ask = runner.of(problem.function)
  maker = TestMaker(Domain(problem), ask, config, reference=reference, salt=problem.id)
  codes = [one.code for one in accepted]
  tests = list(await maker.by_difference(codes))
  for code in codes:  # by itself, so that it can be compared with the other kinds
    found = await maker.by_attack(code)
    tests += [] if found is None else [found]
  tests += await maker.by_size(codes) if codes else []
  caught: dict[str, list[Kind]] = {}
  for one in accepted:
    kinds = {kind for kind in KINDS for _ in await _failed(ask, one, tests, kind)}
    caught[one.name] = [kind for kind in KINDS if kind in kinds]
  return Found(
    refused=len(wrong) - len(accepted),
    own=[o.name for o, v in zip(accepted, verdicts, strict=True) if v.outcome != "right"],
    caught=caught,
    tests={k: [_short(t) for t in tests if t.kind == k] for k in KINDS},
    slow=next((o.name for o in accepted if o.slow), ""),
  )


async def _failed(ask: Ask, one: Wrong, tests: Sequence[PoolTest], kind: Kind) -> list[int]:
  """The tests of a kind that a candidate fails. They are asked one kind at a time, so that a call
  that hangs does not hide the others."""
  own = [t for t in tests if t.kind == kind]
  texts = texts_of(await ask(one.code, [t.arguments for t in own])) if own else []
  return failed_by(own, texts)


def _short(test: PoolTest) -> str:
  """A test in words that a person can read."""
  text = ", ".join(map(repr, test.arguments))
  return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def report_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Counts over all tasks; slow twins are counted apart from mutants.

  ``own_tests`` are the accepted mutants that the task's own tests catch, ``missed_by_own_tests``
  those that only generated tests do.
  """
  caught: dict[bool, dict[str, frozenset[Kind]]] = {True: {}, False: {}}
  for row in rows:
    for name, kinds in row["caught"].items():
      caught[name == row["slow"]][f"{row['id']} {name}"] = frozenset(kinds)
  return {
    "tasks": len(rows),
    "refused_by_examples": sum(row["refused"] for row in rows),
    "own_tests": sum(name != row["slow"] for row in rows for name in row["own"]),
    "missed_by_own_tests": sum(
      bool(kinds) and name not in row["own"] and name != row["slow"]
      for row in rows
      for name, kinds in row["caught"].items()
    ),
    "tests": {k: sum(len(row["tests"][k]) for row in rows) for k in KINDS},
    "mutants": dataclasses.asdict(count_separations(caught[False])),
    "slow": dataclasses.asdict(count_separations(caught[True])),
  }


async def separate_tasks(
  tasks: Sequence[Task],
  rows: RowFile,
  runner: Runner,
  config: PoolConfig,
  *,
  mutants: int,
  concurrency: int,
  console: Console,
) -> None:
  """A row for every task that has none yet; those of a sandbox's fault are left out."""
  problems = {t.id: problem for t in tasks if (problem := read_problem(t)) is not None}

  async def work(task: Task) -> None:
    problem = problems[task.id]
    wrong = wrong_candidates(
      task.answer, problem.function, most=mutants, seed=config.seed + task.id
    )
    if "buggy" in task.metadata:
      wrong = [Wrong("buggy", task.metadata["buggy"]), *wrong]
    own = UnitTests.from_metadata(task.metadata[UNIT_TESTS])
    try:
      found = await separate(problem, task.answer, wrong, own, runner, config)
    except VerifierFault as error:
      print_line(console, f"task {task.id} is left out: {error}")
      return
    if found is not None:
      rows.append({"id": task.id, **dataclasses.asdict(found)})

  usable = [task for task in tasks if task.id in problems]
  await fill([rows], usable, work, what="tasks", report=unreported, concurrency=concurrency)
