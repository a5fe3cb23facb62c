"""SQL episodes: results compared, copies, verdicts, cheats, the tool, branching."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3

import pytest

from agentjax.config import ConfigError
from agentjax.sandbox.process import ProcessSandbox
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.world.world import Site
from agentjax.worlds.sql.copies import Perturbation, choose_copies, perturbed_copy
from agentjax.worlds.sql.environment import SqlJudge, SqlWorldConfig, _Kept, read_query
from agentjax.worlds.sql.results import is_ordered, overlap, results_match
from agentjax.worlds.sql.statements import run_sql
from agentjax.worlds.sql.world import SqlWorld

SCHEMA = """
CREATE TABLE owner (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE pet (id INTEGER PRIMARY KEY, owner INT REFERENCES owner (id), kind TEXT, weight REAL);
"""
GOLD = "SELECT name FROM owner JOIN pet ON pet.owner = owner.id WHERE kind = 'cat' ORDER BY weight"


def _database(path):
  connection = sqlite3.connect(path)
  connection.executescript(SCHEMA)
  connection.executemany("INSERT INTO owner VALUES (?, ?)", [(i, f"o{i}") for i in range(1, 11)])
  connection.executemany(
    "INSERT INTO pet VALUES (?, ?, ?, ?)",
    [(i, i % 10 + 1, ("cat", "dog", "owl")[i % 3], 10.5 - 0.25 * i) for i in range(1, 31)],
  )
  connection.execute("CREATE TABLE hut (pet INT REFERENCES pet (id), colour TEXT)")
  connection.commit()
  connection.close()
  return str(path)


def _query(raw, *queries):
  """The rows of each query on the contents of a database."""
  with contextlib.closing(sqlite3.connect(":memory:")) as connection:
    connection.deserialize(raw)
    return [connection.execute(query).fetchall() for query in queries]


def _read(path):
  with open(path, "rb") as file:
    return file.read()


@pytest.fixture(scope="module")
def database(tmp_path_factory):
  return _database(tmp_path_factory.mktemp("sql") / "pets.sqlite")


def _task(database, gold=GOLD):
  demonstration = (
    Message("assistant", "", (ToolCall("sql", {"query": gold}),)),
    Message("tool", ""),
    Message("assistant", f"#### {gold}"),
  )
  metadata = {"database": database}
  return Task(3, (Message("user", "Whose cats?"),), gold, "pets", demonstration, metadata)


def _judge(work, **settings):
  """``await work(judge)`` with a judge of its own sandbox."""

  async def run():
    config = SqlWorldConfig(**settings)
    sandbox = ProcessSandbox()
    try:
      return await work(SqlJudge(sandbox, config))
    finally:
      await sandbox.close()

  return asyncio.run(run())


@pytest.mark.parametrize(
  ("query", "ordered"),
  [
    ("SELECT a FROM t ORDER BY a", True),
    ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
    ("SELECT 'order by' FROM t", False),
    ("SELECT a FROM t -- order by a", False),
    ("SELECT a FROM t WHERE b IN (SELECT b FROM u) order  by a LIMIT 1", True),
    ('SELECT "x)" FROM t ORDER BY 1', True),
  ],
)
def test_only_an_order_by_of_its_own_makes_a_query_ordered(query, ordered):
  assert is_ordered(query) is ordered


@pytest.mark.parametrize(
  ("gold", "predicted", "settings", "match"),
  [
    ([(1,), (2,)], [(2,), (1,)], {"ordered": False}, True),
    ([(1,), (2,)], [(2,), (1,)], {"ordered": True}, False),
    ([(1,), (1,), (2,)], [(1,), (2,), (2,)], {"ordered": False}, False),  # multisets
    ([(1, "a")], [("a", 1)], {"ordered": False}, False),
    (
      [(1, "a"), (2, "b")],
      [("b", 2), ("a", 1)],
      {"ordered": False, "any_column_order": True},
      True,
    ),
    ([(1, 2), (2, 1)], [(1, 1), (2, 2)], {"ordered": False, "any_column_order": True}, False),
    ([(1.0,)], [(1,)], {"ordered": True}, True),
    ([(1 / 3,)], [(0.33333333,)], {"ordered": True}, True),
    ([(1 / 3,)], [(0.333,)], {"ordered": True}, False),
    ([(1,)], [("1",)], {"ordered": True}, False),
    ([(None,)], [(0,)], {"ordered": True}, False),
    ([(None, "x"), (2, "y")], [(2, "y"), (None, "x")], {"ordered": False}, True),
    ([], [], {"ordered": True}, True),
    ([(1,)], [(1, 1)], {"ordered": True}, False),
    ([(float("inf"),)], [(float("inf"),)], {"ordered": False}, True),
    ([(b"\x00",)], ["\x00"], {"ordered": True}, False),
  ],
)
def test_results_match(gold, predicted, settings, match):
  assert results_match(gold, predicted, **settings) is match


def test_overlap_is_intersection_over_union_times_kendalls_tau():
  rows = [("a",), ("b",), ("c",), ("d",)]
  assert overlap(rows, rows) == 1.0
  assert overlap(rows, rows[::-1]) == -1.0
  assert overlap(rows, [("a",), ("b",)]) == 0.5
  assert overlap(rows, [("b",), ("a",), ("c",), ("d",)]) == 0.67  # tau = (5 - 1) / 6
  assert overlap(rows[:1], [("a",), ("x",)]) == 0.5  # one shared row has no order
  assert overlap([], []) == 1.0
  assert overlap(rows, []) == 0.0


def test_a_copy_keeps_the_schema_and_its_references_but_not_the_contents(database):
  original = _read(database)
  first, second = (perturbed_copy(original, Perturbation(seed)) for seed in (1, 2))
  assert first == perturbed_copy(original, Perturbation(1)) and first != second
  lost = "SELECT * FROM pet WHERE owner NOT IN (SELECT id FROM owner)"
  pets, schema = "SELECT id, owner, kind, weight FROM pet", "SELECT sql FROM sqlite_master"
  rows = {}
  for name, raw in (("original", original), ("copy", first)):
    rows[name], orphans, described = _query(raw, pets, lost, schema)
    assert orphans == [] and described[0][0].startswith("CREATE")
  assert 0 < len(rows["copy"]) < len(rows["original"])
  keys = {(i, owner) for i, owner, _, _ in rows["original"]}
  assert {(i, owner) for i, owner, _, _ in rows["copy"]} <= keys  # keys stay together
  assert not {r[:4] for r in rows["copy"]} <= {r[:4] for r in rows["original"]}  # values do not
  assert {w for *_, w in rows["copy"]} <= {w for *_, w in rows["original"]}  # and none is new


def test_no_table_loses_all_rows_and_what_dangled_before_stays():
  connection = sqlite3.connect(":memory:")
  connection.executescript(SCHEMA)
  connection.execute("INSERT INTO owner VALUES (1, 'a'), (2, 'b')")
  connection.execute("INSERT INTO pet VALUES (1, 2, 'cat', 1.0), (2, 77, 'dog', 2.0)")
  raw = connection.serialize()
  connection.close()
  for seed in range(20):
    copy = perturbed_copy(raw, Perturbation(seed, drop=0.9))
    (pets,), (owners,) = _query(copy, "SELECT count(*) FROM pet", "SELECT count(*) FROM owner")
    assert pets[0] >= 1 and owners[0] >= 1
  whole = perturbed_copy(raw, Perturbation(1, drop=0.0))
  assert _query(whole, "SELECT owner FROM pet ORDER BY id") == [[(2,), (77,)]]


STATED = (
  GOLD,
  "SELECT count(*) FROM pet",
  "SELECT DISTINCT kind FROM pet",  # which no share of dropped rows changes
  "SELECT count(*) FROM pet WHERE kind = 'emu'",  # 0, and so on every plain copy
  "SELECT max(weight) FROM pet",
  "SELECT kind FROM pet GROUP BY kind HAVING count(*) > 3",
  "SELECT name FROM owner WHERE id NOT IN (SELECT owner FROM pet WHERE kind = 'cat')",
)


@pytest.mark.parametrize("gold", STATED)
def test_stated_rows_never_match_and_the_gold_query_always_does(database, gold):
  (rows,) = _query(_read(database), gold)
  values = ", ".join(f"({', '.join(map(repr, row))})" for row in rows)
  stated = f"SELECT column1 FROM (VALUES {values}), (SELECT 1 FROM owner), (SELECT 1 FROM pet)"
  queries = [gold, f"{stated} LIMIT {len(rows)}", f"VALUES {values}"]

  async def work(judge):
    return [(await judge.judge(database, gold, query)).match for query in queries]

  assert _judge(work) == [True, False, False]


@pytest.mark.parametrize(
  ("gold", "same"),
  [
    (
      "SELECT count(*) FROM pet WHERE kind = 'cat'",
      "SELECT sum(CASE WHEN kind = 'cat' THEN 1 ELSE 0 END) FROM pet",  # NULL on no rows
    ),
    (
      "SELECT owner FROM pet GROUP BY owner ORDER BY sum(weight) DESC LIMIT 1",
      "SELECT owner FROM (SELECT owner, sum(weight) AS w FROM pet GROUP BY owner) "
      "ORDER BY w DESC LIMIT 1",
    ),
    (
      "SELECT kind FROM pet GROUP BY kind ORDER BY count(*) DESC, max(weight) DESC LIMIT 1",
      "SELECT kind FROM (SELECT kind, count(*) AS n, max(weight) AS w FROM pet GROUP BY kind) "
      "ORDER BY n DESC, w DESC LIMIT 1",
    ),
    (
      "SELECT count(*) FROM pet JOIN owner ON pet.owner = owner.id WHERE name = 'o3'",
      "SELECT count(*) FROM pet WHERE owner = (SELECT id FROM owner WHERE name = 'o3')",
    ),
    (
      "SELECT count(*) FROM pet JOIN owner ON pet.owner = owner.id WHERE name = 'Bo'",
      "SELECT count(*) FROM pet WHERE owner = (SELECT id FROM owner WHERE name = 'Bo')",
    ),
  ],
)
def test_a_query_that_means_the_same_matches(database, gold, same):
  async def work(judge):
    return await judge.judge(database, gold, same)

  assert _judge(work).match


def test_copies_on_which_equals_decide_are_left_out(database):
  # Kinds have ten pets each: on most copies some two of them tie.
  gold = "SELECT kind FROM pet GROUP BY kind ORDER BY count(*) DESC LIMIT 1"
  raw = _read(database)
  chosen = choose_copies(raw, gold, copies=3, candidates=32)
  assert chosen
  for how in chosen:
    (counts,) = _query(
      perturbed_copy(raw, how), "SELECT count(*) FROM pet GROUP BY kind ORDER BY 1 DESC"
    )
    assert counts[0] != counts[1]


def test_a_question_that_no_copy_changes_has_no_verdict_unless_reading_is_enough(database):
  gold = "SELECT count(*) FROM hut JOIN pet ON hut.pet = pet.id"  # there are no huts

  async def refuse(judge):
    with pytest.raises(ValueError, match=r"no_copies=\"tables\""):
      await judge.judge(database, gold, gold)

  async def judged(judge):
    some = "SELECT 0 FROM pet LIMIT 1"
    return [(await judge.judge(database, gold, query)).match for query in (gold, some)]

  _judge(refuse)
  assert _judge(judged, no_copies="tables") == [True, False]


def test_what_is_kept_is_bounded_by_its_bytes():
  kept = _Kept(100)
  for key, size in (("a", 40), ("b", 40), ("huge", 1000)):
    assert kept.put(key, key.upper(), size) == key.upper()
  assert kept.get("huge") is None and kept.get("a") == "A"
  kept.put("c", "C", 40)  # b was used longest ago
  assert (kept.get("a"), kept.get("b"), kept.get("c")) == ("A", None, "C")


def test_a_long_result_matches_nothing(database):
  gold, long = "SELECT count(*) FROM pet", "SELECT hex(zeroblob(1000)) FROM pet"

  async def work(judge):
    with pytest.raises(ValueError, match="max_bytes=10000"):
      await judge.judge(database, long, gold)
    return await judge.judge(database, gold, long)

  assert not _judge(work, max_bytes=10_000).match


def test_what_is_right_by_accident_fails_on_a_copy(database):
  # Every third pet is a cat here, which is true of no other contents.
  lucky = GOLD.replace("kind = 'cat'", "pet.id IN (3, 6, 9, 12, 15, 18, 21, 24, 27, 30)")

  async def work(judge):
    return [await judge.judge(database, GOLD, q) for q in (GOLD, lucky)]

  right, accident = _judge(work)
  assert right.match and right.reason == ""
  assert not accident.match and accident.overlap == 1.0
  assert accident.reason.startswith("on perturbed copy")
  _, alone = _judge(work, copies=0)
  assert alone.match  # without copies it passes


def test_a_gold_query_that_fails_is_a_fault_and_no_verdict(database):
  async def work(judge):
    with pytest.raises(ValueError, match="the gold query 'SELECT x FROM y'"):
      await judge.judge(database, "SELECT x FROM y", "SELECT 1")
    verdict = await judge.judge(database, "SELECT count(*) FROM pet", "SELEC")
    assert (verdict.match, verdict.runs) == (False, False)

  _judge(work)


def test_queries_never_change_the_file(database):
  before = open(database, "rb").read()

  async def run():
    sandbox = ProcessSandbox()
    try:
      queries = ["DELETE FROM pet", "SELECT count(*) FROM pet"]
      return await run_sql(sandbox, [before], [(0, query) for query in queries])
    finally:
      await sandbox.close()

  refused, counted = asyncio.run(run())
  assert refused.error == "not authorized"
  assert counted.rows == ((30,),)
  assert counted.tables == {"pet"}
  assert open(database, "rb").read() == before


@pytest.mark.parametrize(
  ("text", "query"),
  [
    ("so:\n```sql\nSELECT 1\n;\n```", "SELECT 1"),
    ("```sql\nSELECT 1\n```\nno:\n```sql\nSELECT 2\n```", "SELECT 2"),
    ("#### SELECT 3;", "SELECT 3"),
    ("#### SELECT 1\n#### SELECT\n 4", "SELECT\n 4"),
    ("SELECT 5", None),
    ("####", None),
    ("#### " + "x" * 30_000, None),
  ],
)
def test_the_last_marked_query_is_the_answer(text, query):
  assert read_query(text) == query


def test_an_episode_goes_on_from_a_snapshot_in_a_fresh_environment(database):
  registry = build_tools(ToolsConfig(names=("sql",)))
  world = SqlWorld(SqlWorldConfig(), Site(registry, max_turns=4, tool_timeout=20.0))
  call = Action("", (ToolCall("sql", {"query": "SELECT count(*) FROM pet"}),))

  async def run():
    task, first, second = _task(database), world.environment(None), world.environment(None)
    try:
      await first.reset(task, 5)
      seen = await first.step(call)
      state = first.snapshot()
      await second.reset(task, 5)
      second.restore(state)
      again = await second.step(call)
      end = await second.step(Action("#### SELECT 1"))
      return seen, again, end
    finally:
      for environment in (first, second):
        await environment.close()
      await world.close()
      await registry.close()

  seen, again, end = asyncio.run(run())
  assert "30" in seen.observation.messages[0].content
  assert again.observation == seen.observation
  assert (end.terminated, end.answer) == (True, "SELECT 1")


def test_settings_that_cannot_be_are_refused():
  for settings, field in (
    ({"drop": 1.0}, "config.world.drop=1.0"),
    ({"copies": -1}, "config.world.copies=-1"),
    ({"candidates": 2}, "config.world.candidates=2"),
    ({"query_seconds": 0.0}, "config.world.query_seconds=0.0"),
  ):
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
      SqlWorldConfig(**settings).validate()
  assert json.dumps(SqlWorldConfig().to_dict())
