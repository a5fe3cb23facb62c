r"""What stating the rows earns at the SQL judge, on a folder of Spider's layout.

  python benchmarks/sql_judge.py --path=DIR
  python benchmarks/sql_judge.py --path=DIR --recorded

For each different gold query with a result that is not empty: whether some copies change its
result, whether the gold query matches, and whether three queries that state what it returned do.
``--recorded`` adds the queries of the folder's recorded episodes that give the gold result on the
database, and prints those that fail on a copy, to be read: each should be right by accident.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pathlib
import sqlite3

from absl import app, flags

from agentjax.sandbox.process import ProcessSandbox
from agentjax.trajectory.record import Task
from agentjax.worlds.sql.environment import SqlJudge, SqlWorldConfig
from agentjax.worlds.sql.spider import SpiderConfig, load_spider, read_recorded_sql

_PATH = flags.DEFINE_string("path", None, "Folder of Spider's layout.", required=True)
_RECORDED = flags.DEFINE_bool("recorded", False, "Judge the queries of recorded episodes too.")


def _stated(database: str, gold: str) -> dict[str, str]:
  """Queries that state the rows of the gold query."""
  with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    rows = connection.execute(gold).fetchall()
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
  values = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
  columns = ", ".join(f"column{n + 1}" for n in range(len(rows[0])))
  # Tables are read, as the judge asks, and change nothing, even where one is empty.
  read = " + ".join(f'(SELECT count(*) FROM "{name}")' for (name,) in names)
  return {
    "stated": f"VALUES {values}",
    "stated_over_tables": f"SELECT {columns} FROM (VALUES {values}) WHERE {read} >= 0",
    "stated_where_rows": f"SELECT {columns} FROM (VALUES {values}) WHERE {read} > 0",
  }


def _literal(value: object) -> str:
  if value is None:
    return "NULL"
  if isinstance(value, str):
    return "'" + value.replace("'", "''") + "'"
  return repr(value) if not isinstance(value, bytes) else f"x'{value.hex()}'"


async def _measure() -> None:
  tasks = load_spider(SpiderConfig(test_databases=()), _PATH.value).train
  different = {(t.metadata["database"], t.answer): t for t in tasks}
  times = collections.Counter((t.metadata["database"], t.answer) for t in tasks)
  recorded = collections.defaultdict(set)
  if _RECORDED.value:
    by_id = {t.id: (t.metadata["database"], t.answer) for t in tasks}
    for file in sorted(pathlib.Path(_PATH.value, "trajectories").glob("*.json.gz")):
      for episode in read_recorded_sql(file):
        if episode.task_id in by_id:
          recorded[by_id[episode.task_id]] |= {" ".join(q.split()) for q in episode.queries}
  counts: collections.Counter[str] = collections.Counter()
  config = SqlWorldConfig()
  sandbox = ProcessSandbox()
  judge = SqlJudge(sandbox, config)
  turn = asyncio.Semaphore(config.concurrency)

  async def one(task: Task) -> None:
    database, gold = task.metadata["database"], task.answer
    weight = times[database, gold]
    counts["questions"] += weight
    try:
      if not (await judge.judge(database, gold, gold)).match:
        counts["gold fails"] += weight
    except ValueError:
      counts["refused"] += weight
      print("refused:", task.metadata["db"], gold)
      return
    for name, query in _stated(database, gold).items():
      verdict = await judge.judge(database, gold, query)
      counts[f"{name} matches"] += weight * verdict.match
    for query in sorted(recorded[database, gold]):
      verdict = await judge.judge(database, gold, query)
      if verdict.match or verdict.reason.startswith("on perturbed copy"):
        counts["recorded, right on the database"] += 1
        counts["recorded, right on the copies"] += verdict.match
      if verdict.reason.startswith("on perturbed copy"):
        print(f"{task.metadata['db']}\n  gold {gold}\n  got  {query}\n  {verdict.reason}")

  async def bounded(task: Task) -> None:
    async with turn:
      await one(task)

  try:
    await asyncio.gather(*map(bounded, different.values()))
  finally:
    await sandbox.close()
  for name, count in sorted(counts.items()):
    print(f"{name}: {count}")


def main(argv: list[str]) -> None:
  del argv
  asyncio.run(_measure())


if __name__ == "__main__":
  app.run(main)
