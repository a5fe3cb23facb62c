"""Questions to a database: the policy explores it with SQL and answers with one query.

A task's ``answer`` is the gold query; ``metadata["database"]`` is the path of its SQLite file. The
policy's last turn holds its query in a fence marked ``sql``, or after ``####``. Its result is
compared with that of the gold query, on the database and on perturbed copies on which the gold
query returns something else. A query that is right by accident, or that states the rows it has
seen, fails on these. If no such copy is found for a question, there is no verdict.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import pathlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from agentjax.config import (
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Range,
  check,
)
from agentjax.data import DataConfig
from agentjax.places import Places
from agentjax.sandbox.config import DEFAULT
from agentjax.sandbox.interface import Sandbox
from agentjax.text.answers import ANSWER_MARK
from agentjax.tools.build import ToolsConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Reward, Status, Task, Trajectory
from agentjax.world.environment import Observation
from agentjax.world.question import QuestionEnvironment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.sql.copies import Perturbation, choose_copies, perturbed_copy
from agentjax.worlds.sql.results import is_ordered, overlap, results_match
from agentjax.worlds.sql.spider import SpiderConfig
from agentjax.worlds.sql.statements import SqlResult, run_sql
from agentjax.worlds.sql.tool import SqlTool

T = TypeVar("T")

_FENCE = re.compile(r"```[ \t]*(?:sql|sqlite)[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MOST_CHARACTERS = 20_000  # of a query; no question needs more
_CELL_BYTES = 64  # that a value takes in memory besides its text


@dataclasses.dataclass(unsafe_hash=True)
class SqlWorldConfig(WorldConfig):
  """How queries are judged; the figures are ours. The tool has its own settings (tools.sql).

  Attributes:
    query_seconds: longest CPU time of a query on one database; a query that times out while others
      run is run again alone.
    copies: perturbed copies a query is judged on, besides the database itself; 0 for none. On each
      of them the gold query gives another result than on the database.
    candidates: copies that are looked at to find these.
    drop: share of the rows that a copy drops from each table; some drop more, some less.
    no_copies: for a question whose gold query gives the same result on every candidate. "refuse":
      no verdict, the reward is invalid; "tables": a query must read every table that the gold query
      reads (a query that states the rows can do that too).
    max_rows, max_bytes: longest result that is compared; a longer one matches nothing.
    tolerance: relative, between numbers of two results.
    any_column_order: whether a query may give its columns in another order than the gold one.
    concurrency: queries judged at once; no more than the sandbox runs.
    sandbox: name of the sandbox where queries are judged, in ``config.sandboxes``.
    tasks: the questions, in the folder ``config.data.path``.
  """

  query_seconds: PositiveFloat = 5.0
  copies: NonNegativeInt = 3
  candidates: int = 32
  drop: Annotated[float, Range(0, 1, below=True)] = 0.3
  no_copies: Literal["refuse", "tables"] = "refuse"
  max_rows: PositiveInt = 10_000
  max_bytes: PositiveInt = 4 * 2**20
  tolerance: NonNegativeFloat = 1e-6
  any_column_order: bool = False
  concurrency: PositiveInt = 4
  sandbox: str = DEFAULT
  tasks: SpiderConfig = dataclasses.field(default_factory=SpiderConfig)

  def validate(self, path: str = "config.world") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(self.candidates >= self.copies, "candidates", f">= copies ({self.copies})")

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    if data.source is None:
      self.tasks.check_data(data, f"{path}.data")
    writable = getattr(tools.settings.get("sql"), "writable", False)
    check(not writable, f"{path}.tools.settings.sql.writable", writable, "False in the world 'sql'")

  def build(self, site: Site) -> World:
    from agentjax.worlds.sql.world import SqlWorld  # it is built from these settings

    return SqlWorld(self, site)


class SqlEnvironment(QuestionEnvironment):
  """A question whose tool ``sql``, if there is one, works on the task's database."""

  def __init__(self, registry: ToolRegistry, *, max_turns: int, tool_timeout: float):
    super().__init__(
      registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=read_query
    )
    self._tools = [tool for tool in registry.tools if isinstance(tool, SqlTool)]

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await super().reset(task, key)
    database = await asyncio.to_thread(read_database, task.metadata["database"])
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


class _Kept:
  """Values by key, as many as fit into ``max_bytes``: those used last. Safe in threads."""

  def __init__(self, max_bytes: int):
    self._max_bytes = max_bytes
    self._values: collections.OrderedDict[Any, tuple[Any, int]] = collections.OrderedDict()
    self._bytes = 0
    self._lock = threading.Lock()

  def get(self, key: Any) -> Any | None:
    """The value, or None where it is not kept."""
    with self._lock:
      if key not in self._values:
        return None
      self._values.move_to_end(key)
      return self._values[key][0]

  def put(self, key: Any, value: T, size: int) -> T:
    """Keeps a value of ``size`` bytes, unless it is too large by itself; returns it."""
    with self._lock:
      if key not in self._values and size <= self._max_bytes:
        self._values[key] = value, size
        self._bytes += size
      while self._bytes > self._max_bytes:
        _, (_, freed) = self._values.popitem(last=False)
        self._bytes -= freed
    return value


class SqlJudge:
  """Compares queries with gold ones; verdicts and gold results are kept.

  May be used from many threads and event loops at once. A gold query is trusted: the copies are
  chosen by running it in this process. The policy's queries run in the sandbox.

  Args:
    sandbox: where queries run; not the one that episodes hold, if they can hurt it.
    config: see there.
  """

  def __init__(self, sandbox: Sandbox, config: SqlWorldConfig):
    self._sandbox = sandbox
    self._config = config
    self._places = Places(config.concurrency)
    self._kept = _Kept(64 * 2**20)
    self._choosing = threading.Lock()

  async def judge(self, database: str, gold: str, query: str) -> SqlVerdict:
    """The verdict on ``query``.

    Raises:
      SandboxError: the sandbox failed.
      ValueError: the gold query does not run on the database or gives too long a result; or no copy
        changes its result and ``config.no_copies`` is "refuse".
    """
    key = ("verdict", database, gold, query)
    if (verdict := self._kept.get(key)) is not None:
      return verdict
    databases = await asyncio.to_thread(self._databases, database, gold)
    right = ("gold", database, gold)
    if (wanted := self._kept.get(right)) is None:
      wanted = await self._run(databases, gold)
      self._kept.put(right, wanted, _size(wanted))
    if wanted[0].error or not wanted[0].complete:
      limits = f"max_rows={self._config.max_rows} or max_bytes={self._config.max_bytes}"
      problem = wanted[0].error or f"a longer result than {limits}"
      raise ValueError(f"the gold query {gold!r} on {database}: {problem}")
    checked = len(databases) > 1 or self._config.copies == 0
    if not checked and self._config.no_copies == "refuse":
      raise ValueError(
        f"the gold query {gold!r} gives the same result on {database} and on all "
        f"{self._config.candidates} copies, so stating it would pay; leave the question out, or "
        'raise config.world.candidates, or set config.world.no_copies="tables"'
      )
    got = await self._run(databases, query)
    verdict = self._compare(wanted, got, gold, all_tables=not checked)
    size = 2 * (len(gold) + len(query) + len(database) + len(verdict.reason))
    return self._kept.put(key, verdict, size)

  def _databases(self, database: str, gold: str) -> list[bytes]:
    """The database, and its copies on which the gold query gives something else."""
    config, key = self._config, ("copies", database, gold)
    with self._choosing:  # one at a time: members of a group ask for the same
      if (chosen := self._kept.get(key)) is None:
        chosen = choose_copies(
          read_database(database),
          gold,
          copies=config.copies,
          candidates=config.candidates if config.copies else 0,
          drop=config.drop,
          seconds=config.query_seconds,
          max_rows=config.max_rows,
          tolerance=config.tolerance,
          make=lambda how: database_copy(database, how),
        )
        self._kept.put(key, chosen, 2 * (len(database) + len(gold)) + 1000)
    return [read_database(database), *(database_copy(database, how) for how in chosen)]

  def _compare(
    self, wanted: Sequence[SqlResult], got: Sequence[SqlResult], gold: str, *, all_tables: bool
  ) -> SqlVerdict:
    if got[0].error:
      return SqlVerdict(False, 0.0, False, got[0].error)
    shared = max(0.0, overlap(wanted[0].rows, got[0].rows))
    if wanted[0].tables and not got[0].tables & wanted[0].tables:
      return SqlVerdict(False, 0.0, True, "it reads none of the tables that the answer is in")
    if all_tables and (unread := wanted[0].tables - got[0].tables):
      return SqlVerdict(False, shared, True, f"it does not read {', '.join(sorted(unread))}")
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

  async def _run(self, databases: Sequence[bytes], query: str) -> list[SqlResult]:
    for exclusive in (False, True):
      async with self._places.one(exclusive=exclusive):
        results = await run_sql(
          self._sandbox,
          databases,
          [(index, query) for index in range(len(databases))],
          seconds=self._config.query_seconds,
          max_rows=self._config.max_rows,
          max_bytes=self._config.max_bytes,
        )
      if not any(result.late for result in results):
        break
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
    """0..1, see ``SqlVerdict.overlap``: dense, but stating the rows earns it too."""
    return Reward((await self.verdict(trajectory, task)).overlap)

  async def score_runs(self, trajectory: Trajectory, task: Task) -> Reward:
    """1 where the query gives a result at all, else 0."""
    return Reward(float((await self.verdict(trajectory, task)).runs))


_DATABASES = _Kept(256 * 2**20)


def read_database(path: str) -> bytes:
  """The contents of a SQLite file; the same ones for the whole run."""
  return _kept_file((path, None), lambda: pathlib.Path(path).read_bytes())


def database_copy(path: str, how: Perturbation) -> bytes:
  """A perturbed copy of a SQLite file."""
  return _kept_file((path, how), lambda: perturbed_copy(read_database(path), how))


def _kept_file(key: tuple[str, Perturbation | None], make: Callable[[], bytes]) -> bytes:
  if (content := _DATABASES.get(key)) is None:
    content = make()
    _DATABASES.put(key, content, len(content))
  return content


def _size(results: Sequence[SqlResult]) -> int:
  """About the bytes that results take in memory."""
  cells = (cell for result in results for row in result.rows for cell in row)
  return sum(
    _CELL_BYTES + (4 * len(cell) if isinstance(cell, str | bytes) else 0) for cell in cells
  )
