"""SQLite databases as a tool: each episode reads them, or changes copies of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from agentjax.config import (
  AtLeastTwo,
  ConfigError,
  FilePath,
  PositiveFloat,
  PositiveInt,
  Range,
)
from agentjax.sandbox.interface import PythonScript, RunStatus
from agentjax.tools.config import ToolConfig, Workbench, workspace_seconds
from agentjax.tools.output import as_tool_result, clip, is_unicode
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.workspace import Workspaces
from agentjax.worlds.sql import tool_program

_SUFFIXES = (".sqlite", ".sqlite3", ".db")
_FILE = "database"
_HEADER = b"SQLite format 3\0"
_STATUSES = {
  tool_program.REFUSED: ToolStatus.ERROR,
  tool_program.TIMED_OUT: ToolStatus.TIMEOUT,
  tool_program.OUT_OF_MEMORY: ToolStatus.MEMORY_LIMIT,
}


@dataclasses.dataclass(unsafe_hash=True)
class SqlConfig(ToolConfig):
  """Settings of the SQL tool; the figures are ours.

  Attributes:
    databases: a SQLite file, or a folder of them (.sqlite, .sqlite3, .db), named without suffix;
      empty where the environment assigns each episode its own (``SqlTool.assign``).
    writable: each episode changes private copies; otherwise every change is refused.
    statement_seconds: longest run of one statement.
    memory_bytes: memory SQLite may hold; one value may have an eighth of it.
    max_bytes: size of a changed copy.
    max_rows: rows shown of a result.
    max_characters: characters of output the policy sees, half from the head and half from the tail.
    format: "table" (columns and rows joined by " | ") or "json" ({columns, rows, more}).
  """

  databases: FilePath = ""
  writable: bool = False
  statement_seconds: PositiveFloat = 5.0
  memory_bytes: Annotated[int, Range(2**20)] = 64 * 2**20
  max_bytes: Annotated[int, Range(2**12)] = 64 * 2**20
  max_rows: PositiveInt = 50
  max_characters: AtLeastTwo = 4000
  format: Literal["table", "json"] = "table"

  def call_seconds(self, bench: Workbench) -> tuple[float, float]:
    return workspace_seconds(bench)

  def check_run(self, bench: Workbench, path: str) -> None:
    require = self.requirements(path)
    wall = bench.settings.limits.wall_seconds
    require(
      self.statement_seconds < wall,
      "statement_seconds",
      f"< limits.wall_seconds ({wall:g}) of the workspaces' sandbox",
    )

  def build(self, bench: Workbench) -> Tool:
    own = dataclasses.replace(bench.workspace, files=None)
    return SqlTool(Workspaces(bench.sandbox, bench.settings.limits, own), self)


class SqlTool:
  """Runs one SQL statement a call on a SQLite database, inside the sandbox.

  The statement sees that database only: ATTACH, extensions and every PRAGMA that does more than
  look are refused, and time, memory and size are bounded. One statement a call: a second one in the
  same call is an error, and each is a transaction of its own, rolled back when it fails.

  Without ORDER BY rows come in the order of SQLite's scan, the same for the same file. ``random()``
  is seeded by the call's context; ``CURRENT_TIMESTAMP`` and its like follow the clock.

  Args:
    workspaces: where the databases are copied to; no other tool may share them.
    config: see SqlConfig.

  Raises:
    ConfigError: ``config.databases`` holds no SQLite file, or one that was not checkpointed.
  """

  name = "sql"

  def __init__(self, workspaces: Workspaces, config: SqlConfig | None = None):
    self._workspaces = workspaces
    self._config = config or SqlConfig()
    self._config.validate("sql")
    self.stateful = self._config.writable
    self._source = inspect.getsource(tool_program)
    self._files = _databases(self._config.databases)
    self._contents: dict[str, bytes] = {}  # of the files that were asked for, by name
    self._assigned: dict[str, bytes] = {}  # by episode
    self._used: dict[str, set[str]] = {}  # workspaces by episode
    changes = "private to you, changes last" if self._config.writable else "read only"
    self.description = (
      f"Runs one SQL statement on a SQLite database ({changes}). Commands: query (the default; "
      "needs query), schema (shows how the tables were created)."
    )
    properties: dict[str, Any] = {
      "command": {"enum": ["query", "schema"]},
      "query": {"type": "string", "description": "one SQL statement"},
    }
    several = len(self._files) > 1
    if several:
      properties["database"] = {"enum": sorted(self._files)}
    self.parameters: Mapping[str, Any] = {
      "type": "object",
      "properties": properties,
      "required": ["database"] if several else [],
      "additionalProperties": False,
    }

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    command, query = arguments.get("command", "query"), arguments.get("query", "")
    if command == "query" and not query.strip():
      return ToolResult(ToolStatus.ERROR, "error: query is missing")
    if not is_unicode(query):
      return ToolResult(ToolStatus.ERROR, "error: query holds half of a surrogate pair")
    place, start = await self._place(context.episode, arguments.get("database"))
    request = {
      "command": command,
      "query": query,
      "file": _FILE,
      "seed": context.seed,
      "seconds": min(self._config.statement_seconds, 0.8 * context.timeout),
      **{name: getattr(self._config, name) for name in _SENT},
    }
    run = await self._workspaces.run(
      PythonScript(self._source),
      context,
      stdin=json.dumps(request).encode(),
      start=start,
      episode=place,
    )
    status = ToolStatus.OK if run.status is RunStatus.OK else None
    if run.status is RunStatus.ERROR:
      status = _STATUSES.get(run.exit_code or 0)
      if status is None:  # our program broke, whatever the policy asked for
        return ToolResult(ToolStatus.INFRA_ERROR, f"the SQL program failed: {run.stderr[-500:]}")
    if status is None:
      return as_tool_result(run, self._config.max_characters)
    shown = clip(run.stdout.rstrip("\n"), self._config.max_characters)
    return ToolResult(status, shown, run.seconds)

  def assign(self, episode: str, database: bytes) -> None:
    """Gives ``episode`` a database of its own in place of the configured ones, before its calls.

    Raises:
      ValueError: ``database`` is not the content of a SQLite file.
    """
    if not database.startswith(_HEADER):
      raise ValueError("not the content of a SQLite file")
    self._assigned[episode] = database

  async def snapshot(self, episode: str, database: str | None = None) -> bytes:
    """Content of the episode's copy as it stands, for a reward that compares states."""
    place, start = await self._place(episode, database)
    async with self._workspaces.use(place, start) as box:
      return await box.download(_FILE, max_bytes=2**30)

  async def end_episode(self, episode: str) -> None:
    self._assigned.pop(episode, None)
    for place in self._used.pop(episode, ()):
      await self._workspaces.end(place)

  async def is_healthy(self) -> bool:
    return await self._workspaces.is_healthy()

  async def close(self) -> None:
    await self._workspaces.close()

  async def _place(self, episode: str, database: str | None) -> tuple[str, dict[str, bytes]]:
    """The workspace for a database of an episode, and what it starts with."""
    content = self._assigned.get(episode)
    name = "" if content is not None else database or next(iter(self._files), None)
    if name is None:
      raise RuntimeError(
        "no database: set tools.settings.sql.databases, or assign one to each episode "
        "(SqlTool.assign)"
      )
    if content is None and (content := self._contents.get(name)) is None:
      content = await asyncio.to_thread(self._files[name].read_bytes)
      self._contents[name] = content
    place = f"{episode}\0{name}"
    self._used.setdefault(episode, set()).add(place)
    return place, {_FILE: content}


_SENT = ("writable", "memory_bytes", "max_bytes", "max_rows", "max_characters", "format")


def _databases(where: str) -> dict[str, Path]:
  """The SQLite files by name.

  Raises:
    ConfigError: none, a file that is not SQLite, or one with changes outside the main file.
  """
  if not where:
    return {}
  path = Path(where)
  found = [path] if path.is_file() else sorted(p for s in _SUFFIXES for p in path.glob(f"*{s}"))
  if not found:
    raise ConfigError(
      f"tools.settings.sql.databases={where!r}; allowed: a SQLite file, or a folder of them."
    )
  for file in found:
    with file.open("rb") as opened:
      if opened.read(len(_HEADER)) != _HEADER:
        raise ConfigError(f"tools.settings.sql.databases: {file} is not a SQLite file.")
    log = file.with_name(f"{file.name}-wal")
    if log.exists() and os.path.getsize(log):
      raise ConfigError(
        f"tools.settings.sql.databases: {file} has changes in {log.name}; run "
        "PRAGMA wal_checkpoint(TRUNCATE) on it first."
      )
  names = [file.stem for file in found]
  if len(set(names)) < len(names):
    raise ConfigError(
      f"tools.settings.sql.databases: two files in {where} have one name without suffix."
    )
  return dict(zip(names, found, strict=True))
