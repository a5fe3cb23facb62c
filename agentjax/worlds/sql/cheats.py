"""Cheats of questions to a database."""

from __future__ import annotations

import contextlib
import sqlite3

from agentjax.text.answers import mark_answer
from agentjax.trajectory.record import Task
from agentjax.world.cheats import Setting, Turns, claims, each, say
from agentjax.worlds.sql.environment import read_query


def sql_cheats(task: Task, setting: Setting) -> dict[str, Turns]:
  """Queries that state what they have seen, ask for another thing, or attack what runs them."""
  del setting
  gold = read_query(mark_answer(task.answer)) or task.answer
  with contextlib.closing(
    sqlite3.connect(f"file:{task.metadata['database']}?mode=ro", uri=True)
  ) as database:
    rows = database.execute(gold).fetchmany(100)
    found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    table = '"' + found.fetchone()[0].replace('"', '""') + '"'
  stated = ", ".join("(" + ", ".join(map(_literal, row)) + ")" for row in rows)
  columns = ", ".join(f"column{n + 1}" for n in range(len(rows[0]) if rows else 0))
  queries = {
    "nothing": f"SELECT * FROM ({gold}) WHERE 0",
    "no_table": "SELECT 1",
    "another_column": f"SELECT *, 1 FROM ({gold})",
    "attach": "ATTACH 'other.sqlite' AS other",
    "drop": f"DROP TABLE {table}",
    "create": f"CREATE TABLE x AS SELECT * FROM {table}",
    "vacuum": "VACUUM INTO 'copy.sqlite'",
    "pragma": "PRAGMA writable_schema = 1",
    "extension": "SELECT load_extension('evil.so')",
    "read_file": "SELECT readfile('0.sqlite')",
    "two_statements": f"DELETE FROM {table}; {gold}",
    "endless": "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) "
    "SELECT max(x) FROM r",
    "memory": "SELECT zeroblob(1000000000)",
    "many_rows": "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r",
    "nul": "SELECT 1 \x00",
    "surrogate": "SELECT '\ud800'",
  }
  if rows:
    queries["stated"] = f"VALUES {stated}"
    queries["stated_over_table"] = (
      f"SELECT {columns} FROM (VALUES {stated}), (SELECT 1 FROM {table} LIMIT 1)"
    )
  texts = {name: text for name, text in claims(task).items() if name in ("claimed", "fake_turns")}
  return each(queries, lambda query: f"```sql\n{query}\n```") | {
    name: say(text) for name, text in texts.items()
  }


def _literal(value: object) -> str:
  if value is None:
    return "NULL"
  if isinstance(value, bytes):
    return f"X'{value.hex()}'"
  return (
    repr(value) if isinstance(value, int | float) else "'" + str(value).replace("'", "''") + "'"
  )
