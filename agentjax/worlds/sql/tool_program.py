"""The side of the SQL tool that runs inside the sandbox: one statement on one SQLite file.

Reads one JSON request from stdin, prints text for the policy and ends with 0 or one of the codes
below. Standard library only.
"""

import sys

if __name__ == "__main__":
  del sys.path[0]

import json
import random
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

REFUSED, TIMED_OUT, OUT_OF_MEMORY = 3, 4, 5  # exit codes
_STEPS = 1000  # of SQLite's virtual machine between looks at the clock
_CELL_CHARACTERS = 500
_PRAGMAS = {  # that only look
  "foreign_key_list",
  "function_list",
  "index_info",
  "index_list",
  "index_xinfo",
  "table_info",
  "table_list",
  "table_xinfo",
}
_LOOKING = {
  sqlite3.SQLITE_SELECT,
  sqlite3.SQLITE_READ,
  sqlite3.SQLITE_FUNCTION,
  sqlite3.SQLITE_RECURSIVE,
}
# Of no use where every call is a connection and a transaction of its own, or reach other files.
_NEVER = {
  sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM",
  sqlite3.SQLITE_DETACH: "DETACH",
  sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT and ROLLBACK",
  sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT and RELEASE",
}


class Guard:
  """Says what a statement may do; remembers what it refused, for the policy."""

  def __init__(self, writable: bool):
    self._writable = writable
    self.refused = ""

  def __call__(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_FUNCTION and second and second.lower() == "load_extension":
      self.refused = "load_extension is"
    elif action == sqlite3.SQLITE_PRAGMA:
      if first not in _PRAGMAS:
        self.refused = f"PRAGMA {first} is"
    elif action in _NEVER:
      self.refused = f"{_NEVER[action]} are"
    elif action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
      pass  # what pragma_table_info(...) announces; SQLite itself refuses it as a statement
    elif action not in _LOOKING and not self._writable:
      self.refused = "changes of this database are"
    return sqlite3.SQLITE_DENY if self.refused else sqlite3.SQLITE_OK


def connect(request: dict[str, Any], guard: Guard) -> sqlite3.Connection:
  writable = request["writable"]
  mode = "mode=rw" if writable else "mode=ro&immutable=1"
  connection = sqlite3.connect(
    f"file:{request['file']}?{mode}", uri=True, isolation_level=None, timeout=0.0
  )
  connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
  connection.execute(f"PRAGMA hard_heap_limit = {request['memory_bytes']}")
  connection.execute("PRAGMA temp_store = MEMORY")
  connection.execute("PRAGMA trusted_schema = OFF")
  if writable:
    connection.execute("PRAGMA journal_mode = DELETE")  # one file holds all, also when cut short
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {max(1, request['max_bytes'] // page)}")
  connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, request["memory_bytes"] // 8)
  connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
  generator = random.Random(request["seed"])
  connection.create_function("random", 0, lambda: generator.randrange(-(2**63), 2**63))
  deadline = time.monotonic() + request["seconds"]
  connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
  connection.set_authorizer(guard)
  return connection


def schema(connection: sqlite3.Connection) -> str:
  rows = connection.execute(
    "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' "
    "ORDER BY type = 'index', type, name"
  )
  return "\n".join(f"{sql};" for (sql,) in rows) or "(no tables)"


def query(connection: sqlite3.Connection, guard: Guard, request: dict[str, Any]) -> str:
  """Runs the one statement in a transaction of its own and shows its rows."""
  if request["writable"]:
    connection.set_authorizer(None)
    connection.execute("BEGIN")
    connection.set_authorizer(guard)
  cursor = connection.execute(request["query"])
  most = request["max_rows"]
  rows = cursor.fetchmany(most + 1) if cursor.description else []
  if cursor.description and request["writable"]:
    while cursor.fetchmany(1000):  # RETURNING changes rows as they are fetched
      pass
  if request["writable"]:
    connection.set_authorizer(None)
    connection.execute("COMMIT")
  if not cursor.description:
    return f"ok ({max(0, cursor.rowcount)} rows changed)"
  columns = [column[0] for column in cursor.description]
  more, rows = len(rows) > most, rows[:most]
  if request["format"] == "json":
    return as_json(columns, rows, more, request["max_characters"])
  return as_table(columns, rows, more)


def as_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], more: bool) -> str:
  lines = [" | ".join(columns), *(" | ".join(str(cell(v)) for v in row) for row in rows)]
  count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
  return "\n".join([*lines, f"(only the first {count})" if more else f"({count})"])


def as_json(columns: Sequence[str], rows: Sequence[Sequence[Any]], more: bool, most: int) -> str:
  """As many of the rows as fit into ``most`` characters."""
  plain = [[None if v is None else cell(v) for v in row] for row in rows]
  while True:
    shown = json.dumps({"columns": columns, "rows": plain, "more": more}, ensure_ascii=False)
    if len(shown) <= most or not plain:
      return shown
    plain, more = plain[: min(len(plain) - 1, len(plain) * most // len(shown))], True


def cell(value: Any) -> Any:
  """What is shown of a value: numbers as they are, bytes in hex, long texts cut."""
  if value is None:
    return "NULL"
  if isinstance(value, bytes):
    value = f"x'{value[:_CELL_CHARACTERS].hex()}'"
  if isinstance(value, str) and len(value) > _CELL_CHARACTERS:
    return value[: _CELL_CHARACTERS - 3] + "..."
  return value


def main() -> int:
  sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
  request = json.load(sys.stdin)
  guard = Guard(request["writable"])
  try:
    connection = connect(request, guard)
    asks_schema = request["command"] == "schema"
    shown = schema(connection) if asks_schema else query(connection, guard, request)
  except MemoryError:
    print(f"error: the statement needs more than {request['memory_bytes']} bytes of memory")
    return OUT_OF_MEMORY
  except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, RecursionError) as error:
    if str(error) == "interrupted":
      print(f"error: the statement did not end within {request['seconds']:g} s")
      return TIMED_OUT
    print(f"error: {f'{guard.refused} not allowed' if guard.refused else error}")
    return REFUSED
  print(shown)
  return 0


if __name__ == "__main__":
  sys.exit(main())
