"""The SQL tool: reads, private copies, and SQL that means harm."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pathlib
import sqlite3
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentjax.config import ConfigError
from agentjax.sandbox import ProcessSandbox, SandboxLimits
from agentjax.tools import ToolContext, ToolRegistry, ToolResult, ToolStatus
from agentjax.tools.workspace import WorkspaceConfig, Workspaces
from agentjax.trajectory.record import ToolCall
from agentjax.worlds.sql.tool import SqlConfig, SqlTool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
Sql = Callable[..., ToolResult]

_LONG = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def make_database(path: pathlib.Path, *statements: str) -> bytes:
  connection = sqlite3.connect(path)
  for statement in statements:
    connection.execute(statement)
  connection.commit()
  connection.close()
  return path.read_bytes()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
  folder = tmp_path_factory.mktemp("databases")
  make_database(
    folder / "shop.sqlite",
    "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL)",
    "INSERT INTO item VALUES (1, 'tea', 2.5), (2, 'cup', NULL), (3, 'pot', 12)",
    "CREATE INDEX by_name ON item (name)",
  )
  make_database(folder / "other.db", "CREATE TABLE secret (x)", "INSERT INTO secret VALUES (7)")
  return str(folder)


class Database:
  """The tool with some settings, and calls of it."""

  def __init__(self, config: SqlConfig):
    limits = SandboxLimits(memory_bytes=2**28)
    self.tool = SqlTool(Workspaces(ProcessSandbox(), limits, WorkspaceConfig()), config)
    self.registry = ToolRegistry([self.tool])

  def __call__(self, query: str, episode: str = "e", **arguments: Any) -> ToolResult:
    seed, timeout = arguments.pop("seed", 0), arguments.pop("timeout", 20.0)
    arguments = {"database": "shop", "query": query, **arguments}
    call = ToolCall("sql", {k: v for k, v in arguments.items() if v is not None})
    return asyncio.run(self.registry.call(call, ToolContext(episode, seed, timeout)))


@pytest.fixture(scope="module")
def read_only(shop: str) -> Iterator[Database]:
  database = Database(SqlConfig(shop, statement_seconds=1.0, max_rows=3, memory_bytes=2**24))
  yield database
  asyncio.run(database.registry.close())


@pytest.fixture(scope="module")
def writable(shop: str) -> Iterator[Database]:
  database = Database(SqlConfig(shop, writable=True, max_bytes=2**16, format="json"))
  yield database
  asyncio.run(database.registry.close())


def test_rows_come_as_a_table_and_are_counted(read_only: Database) -> None:
  result = read_only("SELECT name, price AS cost FROM item ORDER BY id")
  assert (result.status, result.output) == (
    ToolStatus.OK,
    "name | cost\ntea | 2.5\ncup | NULL\npot | 12.0\n(3 rows)",
  )
  many = read_only("SELECT a.id FROM item a, item b ORDER BY 1").output
  assert many == "id\n1\n1\n1\n(only the first 3 rows)"
  assert read_only("SELECT x'00ff' AS b, 'a' AS t WHERE 1 = 1").output.endswith(
    "x'00ff' | a\n(1 row)"
  )
  assert read_only("SELECT 1 WHERE 0").output == "1\n(0 rows)"


def test_schema_shows_tables_then_indexes(read_only: Database) -> None:
  assert read_only("", command="schema").output == (
    "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);\n"
    "CREATE INDEX by_name ON item (name);"
  )


def test_each_database_is_alone(read_only: Database) -> None:
  assert read_only("SELECT x FROM secret", database="other").output == "x\n7\n(1 row)"
  assert "no such table" in read_only("SELECT x FROM secret").output
  assert "invalid arguments" in read_only("SELECT 1", database="third").output


@pytest.mark.parametrize(
  ("query", "message"),
  [
    ("", "query is missing"),
    ("SELEC 1", "syntax error"),
    ("SELECT * FROM missing", "no such table: missing"),
    ("SELECT 1; SELECT 2", "one statement at a time"),
    ("\ud800", "surrogate"),
    ("DELETE FROM item", "changes of this database are not allowed"),
    ("UPDATE sqlite_master SET sql = ''", "sqlite_master may not be modified"),
    ("CREATE TEMP TABLE t (x)", "changes of this database are not allowed"),
    ("INSERT INTO item VALUES (9, 'x', 1) RETURNING id", "changes of this database are"),
    ("ATTACH '/etc/passwd' AS p", "ATTACH and VACUUM are not allowed"),
    ("VACUUM INTO 'copy'", "not allowed"),
    ("SELECT load_extension('x')", "not allowed"),
    ("PRAGMA writable_schema = 1", "PRAGMA writable_schema is not allowed"),
    ("PRAGMA hard_heap_limit = 0", "PRAGMA hard_heap_limit is not allowed"),
    ("BEGIN", "BEGIN, COMMIT and ROLLBACK are not allowed"),
    ("SELECT readfile('/etc/passwd')", "no such function"),
    ("SELECT zeroblob(10000000)", "too big"),
  ],
)
def test_what_is_wrong_or_forbidden_is_an_error_for_the_policy(
  read_only: Database, query: str, message: str
) -> None:
  result = read_only(query)
  assert result.status is ToolStatus.ERROR
  assert result.output.startswith("error: ")
  assert message in result.output


def test_looking_pragmas_and_explain_are_allowed(read_only: Database) -> None:
  assert "1 | name | TEXT" in read_only("PRAGMA table_info(item)").output
  assert "price" in read_only("SELECT name FROM pragma_table_info('item')").output
  assert "by_name" in read_only("EXPLAIN QUERY PLAN SELECT * FROM item WHERE name = 'x'").output


def test_time_and_memory_come_back_as_kinds(read_only: Database) -> None:
  slow = read_only(_LONG)
  assert (slow.status, slow.output) == (
    ToolStatus.TIMEOUT,
    "error: the statement did not end within 1 s",
  )
  grow = (
    "WITH RECURSIVE n(i, t) AS (SELECT 1, zeroblob(500000) UNION SELECT i + 1, "
    "zeroblob(500000 + i) FROM n LIMIT 1000) SELECT max(i) FROM n"
  )
  assert read_only(grow).status is ToolStatus.MEMORY_LIMIT
  assert read_only("SELECT count(*) FROM item").output == "count(*)\n3\n(1 row)"


def test_random_follows_the_seed(read_only: Database) -> None:
  draw = "SELECT random(), random() FROM item ORDER BY random()"
  assert read_only(draw, seed=1).output == read_only(draw, seed=1).output
  assert read_only(draw, seed=1).output != read_only(draw, seed=2).output


def test_changes_are_private_last_and_end_with_the_episode(writable: Database, shop: str) -> None:
  before = pathlib.Path(shop, "shop.sqlite").read_bytes()
  assert writable("UPDATE item SET price = 1 WHERE price IS NULL").output == "ok (1 rows changed)"
  returned = writable("INSERT INTO item (name) VALUES ('jug'), ('urn') RETURNING id")
  assert json.loads(returned.output) == {"columns": ["id"], "rows": [[4], [5]], "more": False}
  count = "SELECT count(*) FROM item"
  assert json.loads(writable(count).output)["rows"] == [[5]]
  assert json.loads(writable(count, episode="f").output)["rows"] == [[3]]
  asyncio.run(writable.tool.end_episode("e"))
  assert json.loads(writable(count).output)["rows"] == [[3]]
  assert pathlib.Path(shop, "shop.sqlite").read_bytes() == before


def test_failed_statement_leaves_the_copy_as_it_was(writable: Database) -> None:
  state = asyncio.run(writable.tool.snapshot("g", "shop"))
  assert writable("INSERT INTO item SELECT 100 - id, name, 0 FROM item WHERE id < 99 UNION ALL "
                  "SELECT 1, 'twice', 0", "g").status is ToolStatus.ERROR  # fmt: skip
  large = "CREATE TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 99999) SELECT i FROM n"  # fmt: skip  # noqa: E501
  assert "full" in writable(large, "g").output
  assert asyncio.run(writable.tool.snapshot("g", "shop")) == state


def test_long_json_stays_json(shop: str, tmp_path: pathlib.Path) -> None:
  database = Database(SqlConfig(format="json", max_characters=300, max_rows=100))
  content = make_database(tmp_path / "a.db", "CREATE TABLE t (x)",
                          "INSERT INTO t VALUES ('" + "y" * 40 + "'), (x'00'), (NULL)")  # fmt: skip
  database.tool.assign("e", content)
  small = json.loads(database("SELECT x FROM t", database=None).output)
  assert small["rows"] == [["y" * 40], ["x'00'"], [None]]
  long = database("SELECT a.x FROM t a, t b, t c", database=None).output
  assert len(long) <= 300
  assert json.loads(long)["more"]
  with pytest.raises(ValueError, match="SQLite"):
    database.tool.assign("e", b"text")
  asyncio.run(database.registry.close())


def test_unusable_databases_are_refused_at_the_start(tmp_path: pathlib.Path) -> None:
  with pytest.raises(ConfigError, match="folder of them"):
    Database(SqlConfig(str(tmp_path)))
  (tmp_path / "a.db").write_text("no database")
  with pytest.raises(ConfigError, match="not a SQLite file"):
    Database(SqlConfig(str(tmp_path)))
  (tmp_path / "a.db").unlink()
  make_database(tmp_path / "a.db", "CREATE TABLE t (x)")
  (tmp_path / "a.db-wal").write_bytes(b"x")
  with pytest.raises(ConfigError, match="wal_checkpoint"):
    Database(SqlConfig(str(tmp_path)))
  for name in ("statement_seconds", "memory_bytes", "max_bytes", "max_rows", "max_characters"):
    with pytest.raises(ConfigError, match=name):
      SqlConfig(**{name: 0}).validate("sql")


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="needs the Spider databases")
def test_gold_queries_of_spider_return_their_rows() -> None:
  folder = pathlib.Path(os.environ["AGENTJAX_DATA"], "sql_spider_dev")
  with gzip.open(folder / "tasks.jsonl.gz", "rt") as lines:
    tasks = [json.loads(line) for line in lines][::52]
  config = SqlConfig(str(folder / "databases"), max_rows=200, max_characters=10**6, format="json")
  database = Database(config)

  async def ask(task: dict[str, Any]) -> ToolResult:
    call = ToolCall("sql", {"database": task["db"], "query": task["gold_sql"]})
    return await database.registry.call(call, ToolContext(str(task["id"]), 0, 30.0))

  async def body() -> list[ToolResult]:
    try:
      return await asyncio.gather(*(ask(task) for task in tasks))
    finally:
      await database.registry.close()

  for task, result in zip(tasks, asyncio.run(body()), strict=True):
    assert json.loads(result.output)["rows"] == task["gold_rows"], task["gold_sql"]
