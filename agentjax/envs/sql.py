"""Questions to a database: the policy explores it with SQL and answers with one query.

A task's ``answer`` is the gold query; ``metadata["database"]`` is the path of its SQLite file. The
policy's last turn holds its query in a fence marked ``sql``, or after ``####``. It is judged by
what it returns, next to what the gold query returns, on the database and on perturbed copies of it:
a query that is right by accident, or that states the rows it has seen, fails on those.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import pathlib
import re
import threading
from collections.abc import Sequence

from agentjax.config import Config, check
from agentjax.envs.environment import Environment, Observation
from agentjax.envs.question import QuestionEnvironment
from agentjax.envs.sql_copies import perturbed_copy
from agentjax.envs.sql_results import is_ordered, overlap, results_match
from agentjax.envs.world import Places, World
from agentjax.sandbox.build import SandboxConfig, build_sandbox
from agentjax.sandbox.interface import Sandbox
from agentjax.sandbox.sqlite import SqlResult, run_sql
from agentjax.text.answers import ANSWER_MARK
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.sql import SqlTool
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

_FENCE = re.compile(r"```[ \t]*(?:sql|sqlite)[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MOST_CHARACTERS = 20_000  # of a query; no question needs more


@dataclasses.dataclass(unsafe_hash=True)
class SqlEnvironmentConfig(Config):
  """How queries are judged; the figures are ours. The tool has its own settings (tools.sql).

  Attributes:
    query_seconds: longest time of a query on one database.
    copies: perturbed copies a query is judged on, besides the database itself; 0 for none.
    drop: share of the rows that a copy drops from each table.
    max_rows: longest result that is compared; a longer one matches nothing.
    tolerance: relative, between numbers of two results.
    any_column_order: whether a query may give its columns in another order than the gold one.
    concurrency: queries judged at once; no more than the sandbox runs.
    sandbox: where queries are judged.
  """

  query_seconds: float = 5.0
  copies: int = 2
  drop: float = 0.3
  max_rows: int = 10_000
  tolerance: float = 1e-6
  any_column_order: bool = False
  concurrency: int = 4
  sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

  def validate(self, path: str = "config.environment.sql") -> None:
    super().validate(path)
    check(self.query_seconds > 0, f"{path}.query_seconds", self.query_seconds, "seconds > 0")
    check(self.concurrency >= 1, f"{path}.concurrency", self.concurrency, ">= 1")
    check(self.max_rows >= 1, f"{path}.max_rows", self.max_rows, ">= 1")
    check(self.copies >= 0, f"{path}.copies", self.copies, ">= 0")
    check(0 <= self.drop < 1, f"{path}.drop", self.drop, "0 <= drop < 1")
    check(self.tolerance >= 0, f"{path}.tolerance", self.tolerance, ">= 0")


class SqlEnvironment(QuestionEnvironment):
  """A question whose tool ``sql``, if there is one, works on the task's database."""

  def __init__(self, registry: ToolRegistry, *, max_turns: int, tool_timeout: float):
    super().__init__(
      registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=read_query
    )
    self._tools = [tool for tool in registry.tools if isinstance(tool, SqlTool)]

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await super().reset(task, key)
    database = await asyncio.to_thread(_read_database, task.metadata["database"])
    for tool in self._tools:
      tool.assign(self._episode, database)
    return observation


def read_query(text: str) -> str | None:
  """The query of a final turn: the last fence marked ``sql``, else all after the last ``####``."""
  fenced = _FENCE.findall(text)
  query = fenced[-1] if fenced else text.rpartition(ANSWER_MARK)[2] if ANSWER_MARK in text else ""
  query = query.strip().removesuffix(";").strip()
  return query if 0 < len(query) <= _MOST_CHARACTERS else None


@dataclasses.dataclass(frozen=True)
class SqlVerdict:
  """How a query compares with the gold one.

  Attributes:
    match: the same result on the database and on every copy.
    overlap: of the results on the database itself, clipped to 0..1 (``sql_results.overlap``).
    runs: it gave a result on the database.
    reason: why it does not match; "" where it does.
  """

  match: bool
  overlap: float
  runs: bool
  reason: str = ""


class SqlJudge:
  """Compares queries with gold ones; verdicts and gold results are kept.

  May be used from many threads and event loops at once.

  Args:
    sandbox: where queries run; not the one that episodes hold, if they can hurt it.
    config: see there.
  """

  def __init__(self, sandbox: Sandbox, config: SqlEnvironmentConfig):
    self._sandbox = sandbox
    self._config = config
    self._places = Places(config.concurrency)
    self._kept: collections.OrderedDict[tuple[str, str], list[SqlResult]] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()

  async def judge(self, database: str, gold: str, query: str) -> SqlVerdict:
    """The verdict on ``query``.

    Raises:
      SandboxError: the sandbox failed.
      ValueError: the gold query does not run on the database, or gives too many rows.
    """
    copies = database_copies(database, self._config.copies, self._config.drop)
    wanted = await self._results(database, copies, gold)
    if wanted[0].error or not wanted[0].complete:
      problem = wanted[0].error or f"more than max_rows={self._config.max_rows} rows"
      raise ValueError(f"the gold query {gold!r} on {database}: {problem}")
    got = await self._results(database, copies, query)
    if got[0].error:
      return SqlVerdict(False, 0.0, False, got[0].error)
    shared = max(0.0, overlap(wanted[0].rows, got[0].rows))
    if wanted[0].tables and not got[0].tables & wanted[0].tables:
      return SqlVerdict(False, 0.0, True, "it reads none of the tables that the answer is in")
    for index, (right, answer) in enumerate(zip(wanted, got, strict=True)):
      if right.error or not right.complete:  # a copy that the gold query cannot judge on
        continue
      if reason := self._difference(right, answer, gold):
        where = "the database" if index == 0 else f"perturbed copy {index}"
        return SqlVerdict(False, shared, True, f"on {where}: {reason}")
    return SqlVerdict(True, shared, True)

  def _difference(self, right: SqlResult, answer: SqlResult, gold: str) -> str:
    if answer.error:
      return answer.error
    if len(answer.columns) != len(right.columns):
      return f"{len(answer.columns)} columns instead of {len(right.columns)}"
    if not answer.complete or len(answer.rows) != len(right.rows):
      return f"another number of rows than {len(right.rows)}"
    same = results_match(
      right.rows,
      answer.rows,
      ordered=is_ordered(gold),
      any_column_order=self._config.any_column_order,
      tolerance=self._config.tolerance,
    )
    return "" if same else "other rows"

  async def _results(self, database: str, copies: Sequence[bytes], query: str) -> list[SqlResult]:
    with self._lock:
      if (kept := self._kept.get((database, query))) is not None:
        self._kept.move_to_end((database, query))
        return kept
    async with self._places.place():
      results = await run_sql(
        self._sandbox,
        copies,
        [(index, query) for index in range(len(copies))],
        seconds=self._config.query_seconds,
        max_rows=self._config.max_rows,
      )
    with self._lock:
      self._kept[database, query] = results
      while len(self._kept) > 2048:
        self._kept.popitem(last=False)
    return results

  async def verdict(self, trajectory: Trajectory, task: Task) -> SqlVerdict:
    """The verdict on a trajectory's answer; one without an answer does not match."""
    if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
      return SqlVerdict(False, 0.0, False, "no query was given")
    return await self.judge(task.metadata["database"], task.answer, trajectory.answer)

  async def score_match(self, trajectory: Trajectory, task: Task) -> Reward:
    """1 where the query gives the gold result on the database and every copy, else 0."""
    return Reward(float((await self.verdict(trajectory, task)).match))

  async def score_overlap(self, trajectory: Trajectory, task: Task) -> Reward:
    """0..1, see ``SqlVerdict.overlap``: dense, but it can be had by stating the rows."""
    return Reward((await self.verdict(trajectory, task)).overlap)

  async def score_runs(self, trajectory: Trajectory, task: Task) -> Reward:
    """1 where the query gives a result at all, else 0."""
    return Reward(float((await self.verdict(trajectory, task)).runs))


@functools.lru_cache(maxsize=64)
def database_copies(path: str, copies: int, drop: float) -> tuple[bytes, ...]:
  """The contents of a SQLite file, then of its perturbed copies 1..copies."""
  database = pathlib.Path(path).read_bytes()
  return (database, *(perturbed_copy(database, k, drop=drop) for k in range(1, copies + 1)))


@functools.lru_cache(maxsize=64)
def _read_database(path: str) -> bytes:
  return pathlib.Path(path).read_bytes()


def sql_world(
  config: SqlEnvironmentConfig,
  registry: ToolRegistry,
  *,
  max_turns: int,
  tool_timeout: float,
  sandbox: Sandbox | None = None,
) -> World:
  """SQL episodes. Scorers: ``sql_match``, ``sql_overlap``, ``sql_runs`` (see ``SqlJudge``).

  Args:
    config: settings.
    registry: tools of every episode; its ``sql`` works on the task's database.
    max_turns, tool_timeout: as in ``QuestionEnvironment``.
    sandbox: where queries are judged; None makes one of ``config.sandbox``.
  """
  own = sandbox or build_sandbox(config.sandbox)
  judge = SqlJudge(own, config)

  def make(task: Task) -> Environment:
    del task
    return SqlEnvironment(registry, max_turns=max_turns, tool_timeout=tool_timeout)

  return World(
    make=make,
    tools=registry.tools,
    scorers={
      "sql_match": judge.score_match,
      "sql_overlap": judge.score_overlap,
      "sql_runs": judge.score_runs,
    },
    close=own.close,
  )
