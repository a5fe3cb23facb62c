"""One problem of one's own as the only task of a run, and what the run has found."""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import pathlib

from agentjax.adapters.unit_tests.scorer import UNIT_TESTS
from agentjax.config import FilePath, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.recipes.grandcode.checks import judge_examples, judge_tests
from agentjax.recipes.grandcode.inputs import read_problem
from agentjax.recipes.grandcode.pool import texts_of, vote
from agentjax.recipes.grandcode.world import GrandCodeWorld, pool_of
from agentjax.trajectory.record import Message, Task
from agentjax.worlds.code.sources import CodeTaskSource

_ASK = "Answer with Python code in one ```python block; use the standard library only."


@dataclasses.dataclass(unsafe_hash=True)
class OneProblemConfig(CodeTaskSource):
  """A problem in a text file, which is the one training and the one test task.

  Attributes:
    file: what is to be done, with at least one line ``assert FUNCTION(ARGUMENTS) == RESULT``.
    sha256: of its text, which ``solve`` fills in, so that a run goes on with no other problem; ""
      is any.
  """

  file: FilePath = ""
  sha256: str = ""

  def validate(self, path: str = "config.world.tasks") -> None:
    super().validate(path)
    check(bool(self.file), f"{path}.file", self.file, "a text file with a problem")

  def load(self, data: DataConfig) -> TaskSplits:
    del data
    text = read_text(self.file)
    if self.sha256 not in ("", digest(text)):
      raise DataError("is no longer the problem of this run; give another --workdir", self.file)
    task = problem_task(text, self.file)
    return TaskSplits([task], [dataclasses.replace(task, id=FIRST_TEST_ID)])


def read_text(path: str) -> str:
  """The text of a problem's file.

  Raises:
    DataError: it cannot be read, or is not UTF-8.
  """
  try:
    return pathlib.Path(path).read_text(encoding="utf-8-sig")
  except OSError as error:
    raise DataError(f"cannot be read: {error.strerror}", path) from error
  except UnicodeDecodeError as error:
    raise DataError(f"not UTF-8 at byte {error.start}", path) from error


def digest(text: str) -> str:
  """SHA-256 of a problem's text."""
  return hashlib.sha256(text.encode()).hexdigest()


def problem_task(text: str, path: str) -> Task:
  """A problem as a task; nobody knows its reference program.

  Raises:
    DataError: it has no assert that can be read.
  """
  asserts = [line for line in text.split("\n") if line.startswith("assert ")]
  name = next((n for line in asserts if (n := _function(line))), "")
  task = Task(
    id=0,
    prompt=(Message("user", f"{text.strip()}\n\n{_ASK}"),),
    answer="",
    source="problem",
    metadata={
      "entry_points": [name],
      UNIT_TESTS: {"source": "\n".join(asserts), "modules": {"solution": [name]}},
    },
  )
  if read_problem(task) is None:
    raise DataError(
      "the problem needs a line `assert FUNCTION(ARGUMENTS) == RESULT` with plain values", path
    )
  return task


def _function(line: str) -> str:
  """The function that an assert calls, or ""."""
  try:
    (node,) = ast.parse(line).body
  except (SyntaxError, ValueError):
    return ""
  calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
  return calls[0].func.id if calls else ""  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Chosen:
  """The answer to a problem.

  Attributes:
    code: of the winner; None if no solution passes the examples.
    accepted: different solutions that do.
    votes: how many of them answer as the winner does.
    tests: that separate solutions, by kind.
  """

  code: str | None
  accepted: int
  votes: int
  tests: dict[str, int]


async def choose_solution(world: GrandCodeWorld, task: Task, solutions: list[str]) -> Chosen:
  """The solution on whose answers most accepted solutions agree, and that passes the pool.

  Args:
    world: of the run.
    task: of the problem.
    solutions: what the solver wrote; those that fail the examples do not vote.
  """
  problem = read_problem(task)
  assert problem is not None
  distinct = list(dict.fromkeys(solutions))
  seen = [await judge_examples(code, problem, world.runner) for code in distinct]
  accepted = [c for c, s in zip(distinct, seen, strict=True) if s.outcome == "right"]
  if not accepted:
    return Chosen(None, 0, 0, {})
  tests = await pool_of(world, task, problem, accepted)
  inputs = [e.arguments for e in problem.examples] + [
    t.arguments for t in tests if t.kind != "size"
  ]
  ask = world.runner.of(problem.function)
  found = vote([texts_of(await ask(code, inputs)) for code in accepted])
  kinds = dict(sorted(collections.Counter[str](t.kind for t in tests).items()))
  large = [t for t in tests if t.kind == "size"]
  for group in found.groups:  # the largest first; within it the first that is not too slow
    for member in group:
      judged = await judge_tests(accepted[member], problem, large, world.runner)
      if judged.outcome == "right":
        return Chosen(accepted[member], len(accepted), len(group), kinds)
  winner = found.winner or 0
  votes = len(found.groups[0]) if found.groups else 1
  return Chosen(accepted[winner], len(accepted), votes, kinds)
