"""Spider: both layouts, demonstrations, recorded episodes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pathlib
import sqlite3

import pytest

from agentjax.data.config import DataConfig, load_tasks
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.sandbox.process import ProcessSandbox
from agentjax.worlds.sql.environment import SqlJudge, SqlWorldConfig, read_database, read_query
from agentjax.worlds.sql.results import overlap
from agentjax.worlds.sql.spider import SpiderConfig, load_spider, read_recorded_sql
from agentjax.worlds.sql.statements import run_sql

FOLDER = pathlib.Path(os.environ.get("AGENTJAX_DATA", "")) / "sql_spider_dev"
needs_data = pytest.mark.skipif(
  "AGENTJAX_DATA" not in os.environ or not FOLDER.is_dir(),
  reason="AGENTJAX_DATA names no folder with sql_spider_dev",
)

ROWS = (
  ("shop", "How many items?", "SELECT count(*) FROM item", "easy"),
  ("zoo", "Names?", "SELECT name\nFROM item ;", "medium"),
  ("shop", "None?", "SELECT name FROM item WHERE name = 'x'", "easy"),
  ("shop", "Names by price?", "SELECT name FROM item ORDER BY price", "hard"),
)


def _database(path: pathlib.Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  connection = sqlite3.connect(path)
  connection.executescript(
    "CREATE TABLE kind (id INTEGER PRIMARY KEY); INSERT INTO kind VALUES (1);"
    "CREATE TABLE item (name TEXT, price REAL, kind INT REFERENCES kind (id));"
    "INSERT INTO item VALUES ('pen', 2.5, 1), ('ink', 1.5, NULL);"
  )
  connection.close()


@pytest.fixture
def converted(tmp_path):
  for name in ("shop", "zoo"):
    _database(tmp_path / "databases" / f"{name}.sqlite")
  rows = [
    {"db": db, "question": question, "gold_sql": sql, "hardness": hardness}
    for db, question, sql, hardness in ROWS
  ]
  with gzip.open(tmp_path / "tasks.jsonl.gz", "wt") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
  return tmp_path


def test_the_converted_layout_is_split_by_database(converted):
  config = DataConfig(
    path=str(converted),
    source=SpiderConfig(test_databases=("zoo",), demonstration="checked"),
  )
  tasks = load_tasks(config)
  assert [t.id for t in tasks.train] == [0, 3]  # the third has no rows
  assert [t.id for t in tasks.test] == [FIRST_TEST_ID + 1]
  assert tasks.test[0].answer == "SELECT name FROM item"
  assert tasks.train[1].metadata["level"] == 3
  prompt = tasks.train[0].prompt[0].content
  assert prompt.startswith("Tables:\nkind(id)\nitem(name, price, kind)\nitem.kind = kind.id\n")
  call, result, final = tasks.train[1].demonstration
  assert call.tool_calls[0].arguments == {"query": "SELECT name FROM item ORDER BY price"}
  assert result.content == "name\nink\npen\n(2 rows)"
  assert read_query(final.content) == tasks.train[1].answer


def test_levels_empty_results_and_limits(converted):
  keep = SpiderConfig(drop_empty=False, test_databases=("zoo",))
  assert [t.id for t in load_spider(keep, converted).train] == [0, 2, 3]
  hard = SpiderConfig(levels=(3, 4), test_databases=("zoo",))
  assert [t.id for t in load_spider(hard, converted).train] == [3]
  assert len(load_spider(keep, converted, train_limit=1, test_limit=0).train) == 1
  bare = load_spider(SpiderConfig(schema=False, demonstration="none"), converted).train[0]
  questions = SpiderConfig(split="questions", drop_empty=False)
  assert [t.id for t in load_spider(questions, converted).train] == [0, 1, 2, 3]
  assert "Tables" not in bare.prompt[0].content and bare.demonstration == ()


def test_the_published_layout_has_its_own_split(tmp_path):
  _database(tmp_path / "database" / "shop" / "shop.sqlite")
  row = {"db_id": "shop", "question": "How many?", "query": "SELECT count(*) FROM item"}
  (tmp_path / "train_spider.json").write_text(json.dumps([row, row]))
  (tmp_path / "dev.json").write_text(json.dumps([row]))
  tasks = load_spider(SpiderConfig(), tmp_path)
  assert [t.id for t in tasks.train] == [0, 1]
  assert [t.id for t in tasks.test] == [FIRST_TEST_ID]
  assert "level" not in tasks.test[0].metadata


def test_what_cannot_be_read_names_the_file(tmp_path, converted):
  with pytest.raises(DataError, match="neither dev.json nor tasks.jsonl"):
    load_spider(SpiderConfig(), tmp_path / "none")
  (converted / "databases" / "zoo.sqlite").unlink()
  with pytest.raises(DataError, match=r"zoo\.sqlite: no such database"):
    load_spider(SpiderConfig(), converted)
  with pytest.raises(DataError, match="not a file of recorded SQL episodes"):
    read_recorded_sql(converted / "tasks.jsonl.gz")


def test_recorded_episodes_become_calls_and_an_answer(tmp_path):
  def episode(task, actions, observations, rewards):
    history = {"actions": actions, "observations": observations, "rewards": rewards}
    summary = {"max_reward": max(rewards)}
    return {"task_id": task, "query": "q", "turn_history": history, "summary": summary}

  path = tmp_path / "episodes.json"
  thinking = episode(
    1, ["execute[SELECT 1]\nObservation 2", "submit"], ["[(1,)]", "[(1,)]"], [0, 0.5]
  )
  plain = episode(0, ["SHOW TABLES", "SELECT 2;", "SELECT 3"], ["[]", "[(2,)]", "[]"], [0, 1, 0])
  path.write_text(json.dumps({"1": thinking, "0": plain}))
  first, second = read_recorded_sql(path)
  assert first.rewards == (0, 1, 0) and first.reward == 1 and not first.submitted
  assert [m.role for m in first.messages] == ["assistant", "tool"] * 2 + ["assistant"]
  assert read_query(first.messages[-1].content) == "SELECT 2"  # the best of its queries
  assert second.submitted and second.queries == ("SELECT 1",) and second.rewards == (0.5,)


@needs_data
def test_gold_passes_and_recorded_rewards_are_ours_on_a_sample_of_spider():
  tasks = load_spider(SpiderConfig(), FOLDER)
  assert (len(tasks.train), len(tasks.test)) == (783, 160)
  everything = load_spider(SpiderConfig(drop_empty=False, test_databases=()), FOLDER).train
  assert len(everything) == 1034
  recorded = read_recorded_sql(FOLDER / "trajectories" / "ic_sql_multiturn_gpt-4_10_turns.json.gz")
  asyncio.run(_check([t for t in tasks.test if t.metadata["db"] == "pets_1"][:4], []))
  agree, turns = asyncio.run(_check([], [(everything[e.task_id], e) for e in recorded[:6]]))
  assert turns >= 12
  assert agree == turns


@needs_data
@pytest.mark.slow
def test_all_gold_queries_of_spider_pass():
  # 18 questions to the empty tables of wta_1 are refused, and 8 others.
  tasks = load_spider(SpiderConfig(test_databases=("wta_1",)), FOLDER).train
  assert asyncio.run(_check(tasks, [])) == (8, 0)


@needs_data
@pytest.mark.slow
def test_the_recorded_rewards_of_spider_are_ours_but_for_differences_of_mysql():
  """5,169 episodes on MySQL, scored again on SQLite: 98.9% of the rewards are the same."""
  tasks = load_spider(SpiderConfig(drop_empty=False, test_databases=()), FOLDER).train
  pairs = [
    (tasks[episode.task_id], episode)
    for path in sorted((FOLDER / "trajectories").glob("*.json.gz"))
    for episode in read_recorded_sql(path)
  ]
  assert len(pairs) == 5169
  agree, turns = asyncio.run(_check([], pairs))
  assert turns == 33_346
  assert agree / turns > 0.985


async def _check(golds, pairs):
  """Asserts that gold queries pass; counts the recorded rewards that are ours to 0.011, and all.

  Without pairs it counts the questions that no copy can check.
  """
  config = SqlWorldConfig()
  sandbox = ProcessSandbox()
  try:
    judge = SqlJudge(sandbox, config)
    agree = turns = 0
    for task in golds:
      try:
        verdict = await judge.judge(task.metadata["database"], task.answer, task.answer)
      except ValueError as error:
        assert "no_copies" in str(error)
        agree += 1
        continue
      assert verdict.match and verdict.overlap == 1.0, task
    for task, episode in pairs:
      if not episode.queries:
        continue
      database = read_database(task.metadata["database"])
      queries = [task.answer, *episode.queries]
      gold, *results = await run_sql(sandbox, [database], [(0, q) for q in queries], seconds=2.0)
      scored = list(zip(results, episode.rewards, strict=True))
      if episode.submitted:  # only what was handed in was scored
        scored = scored[-1:]
      for result, reward in scored:
        ours = 0.0 if result.error else overlap(gold.rows, result.rows)
        agree += abs(ours - reward) <= 0.011
        turns += 1
    return agree, turns
  finally:
    await sandbox.close()
