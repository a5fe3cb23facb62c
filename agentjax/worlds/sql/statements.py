"""SQL that a policy wrote, on SQLite databases, in a sandbox.

Each call is a fresh process over copies of the databases that are thrown away with it. Inside it
every statement has a connection of its own, opened read-only and immutable, on which only reading
is authorised: no ATTACH, no write, no extension, and of the pragmas those that describe a schema.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from agentjax.sandbox.interface import (
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  run_once,
)

_CLOCK_OVER_CPU = 3.0
Cell = None | int | float | str | bytes

_RUNNER = r"""
import json, sqlite3, sys, time

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
         sqlite3.SQLITE_RECURSIVE}
PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list",
           "index_info"}
FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
REQUEST = json.load(sys.stdin)

def run(database, query):
  tables = set()
  start = time.process_time()  # the clock goes on while others have the machine

  def authorise(action, first, second, schema, trigger):
    if action == sqlite3.SQLITE_READ and first:
      tables.add(first.lower())
    if action == sqlite3.SQLITE_PRAGMA:
      allowed = (first or "").lower() in PRAGMAS
    elif action == sqlite3.SQLITE_FUNCTION:
      allowed = (second or "").lower() not in FUNCTIONS
    else:
      allowed = action in READS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

  connection = sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)
  connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
  connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4_000_000)
  connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
  connection.set_authorizer(authorise)
  connection.set_progress_handler(
    lambda: time.process_time() - start > REQUEST["seconds"], 20_000)
  most = REQUEST["max_rows"]
  try:
    cursor = connection.execute(query)
    columns = [column[0] for column in cursor.description or ()]
    rows, size, complete = [], 0, True
    for row in cursor:
      size += sum(len(cell) if isinstance(cell, (str, bytes)) else 8 for cell in row)
      if len(rows) == most or size > REQUEST["max_bytes"]:
        complete = False
        break
      rows.append(row)
  except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
    if str(error) == "interrupted":
      return {"error": f"stopped after {REQUEST['seconds']:g} s of CPU time"}
    return {"error": str(error)}
  finally:
    connection.close()
  rows = [[{"hex": c.hex()} if isinstance(c, bytes) else c for c in row] for row in rows]
  return {"columns": columns, "rows": rows, "complete": complete, "tables": sorted(tables)}

for database, query in REQUEST["statements"]:
  print(json.dumps(run(database, query)), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class SqlResult:
  """What one statement gave.

  Attributes:
    error: why it gave nothing, "" where it gave a result.
    columns: names of the columns; known also where there are no rows.
    rows: the rows in the order SQLite gave them.
    complete: False where there were more rows, or longer ones, than were asked for.
    tables: lower-case names of the tables it read from.
    late: whether a clock ended it, which other work of the machine may have brought about.
  """

  error: str = ""
  columns: tuple[str, ...] = ()
  rows: tuple[tuple[Cell, ...], ...] = ()
  complete: bool = True
  tables: frozenset[str] = frozenset()
  late: bool = False


async def run_sql(
  sandbox: Sandbox,
  databases: Sequence[bytes],
  statements: Sequence[tuple[int, str]],
  *,
  seconds: float = 5.0,
  max_rows: int = 10_000,
  max_bytes: int = 4 * 2**20,
  limits: SandboxLimits | None = None,
) -> list[SqlResult]:
  """Runs statements one after another in one fresh process, and gives one result each.

  What a statement does wrong, time-outs, memory and too much output included, is its ``error``;
  where it takes the whole process with it, the statements after it have that error too.

  Args:
    sandbox: where they run.
    databases: SQLite files.
    statements: (index of a database, SQL) pairs; one statement each.
    seconds: longest CPU time of one statement; the clock of all of them is three times that each.
    max_rows: rows kept of one.
    max_bytes: characters and bytes of the rows kept of one; a number counts for 8.
    limits: other bounds of the process; its clocks follow from ``seconds``.

  Raises:
    SandboxError: the sandbox failed, by no fault of the statements.
  """
  limits = limits or SandboxLimits()
  total = seconds * len(statements) + 2.0
  limits = dataclasses.replace(
    limits,
    wall_seconds=_CLOCK_OVER_CPU * total,
    cpu_seconds=total,
    output_bytes=32 * 2**20,
    output_kill_bytes=32 * 2**20,
    file_bytes=max(limits.file_bytes, *(len(d) for d in databases)),
  )
  request = {
    "statements": [(f"{index}.sqlite", query) for index, query in statements],
    "seconds": seconds,
    "max_rows": max_rows,
    "max_bytes": max_bytes,
  }
  outcome = await run_once(
    sandbox,
    PythonScript(_RUNNER),
    stdin=json.dumps(request).encode(),
    files={f"{index}.sqlite": database for index, database in enumerate(databases)},
    limits=limits,
  )
  if outcome.status is RunStatus.INFRA_ERROR:
    raise SandboxError(outcome.detail)
  results = [_result(line) for line in outcome.stdout.splitlines()]
  if len(results) < len(statements) and outcome.status is RunStatus.OK:
    raise SandboxError(f"{len(results)} results of {len(statements)} statements")
  failed = SqlResult(
    error=f"{outcome.status.value}: {outcome.detail}", late=outcome.status is RunStatus.TIMEOUT
  )
  return results[: len(statements)] + [failed] * (len(statements) - len(results))


def _result(line: str) -> SqlResult:
  try:
    values = json.loads(line)
  except ValueError:  # cut off where the process was ended
    return SqlResult(error="more output than is kept")
  if "error" in values:
    return SqlResult(error=values["error"])
  return SqlResult(
    columns=tuple(values["columns"]),
    rows=tuple(tuple(_cell(cell) for cell in row) for row in values["rows"]),
    complete=values["complete"],
    tables=frozenset(values["tables"]),
  )


def _cell(value: Any) -> Cell:
  return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
