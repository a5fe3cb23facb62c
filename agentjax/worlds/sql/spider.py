"""Spider (Yu et al., 1809.08887): questions to SQLite databases, and episodes recorded on them.

Two layouts are read. The published one holds ``train_spider.json``, ``dev.json`` and
``database/NAME/NAME.sqlite``; its dev questions are the test tasks. The other holds
``tasks.jsonl.gz`` (fields db, question, gold_sql, hardness) and ``databases/NAME.sqlite``; the
questions to some of its databases are the test tasks.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentjax.config import AtLeastTwo
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.text.answers import mark_answer
from agentjax.tools.output import clip
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.worlds.sql.tool_program import as_table

SOURCE = "spider"
_LEVELS = {"easy": 1, "medium": 2, "hard": 3, "extra": 4}
_EXECUTE = re.compile(r"\s*execute\[(.*)\]", re.DOTALL)


@dataclasses.dataclass(unsafe_hash=True)
class SpiderConfig(TaskSource):
  """How Spider's questions become tasks; the choices are ours.

  Attributes:
    schema: whether the prompt shows the tables; without, the policy must ask for them.
    demonstration: "none"; "direct", which states the gold query; "checked", which runs it first
      with the tool ``sql`` and then states it.
    shown_rows, shown_characters: of a result in a demonstration; give them what the tool has
      (tools.settings.sql.max_rows and max_characters).
    drop_empty: leave out questions whose gold query returns no row, as do queries that are wrong.
    levels: hardness of the questions taken, 1 (easy) to 4 (extra); where the data say it.
    split: where the data are not split already: "databases", the test tasks are the questions to
      ``test_databases``, which training never sees; "questions", they are every fifth question.
    test_databases: see ``split``.
  """

  reads_path = True

  schema: bool = True
  demonstration: Literal["none", "direct", "checked"] = "direct"
  shown_rows: AtLeastTwo = 50
  shown_characters: AtLeastTwo = 4000
  drop_empty: bool = True
  levels: tuple[int, ...] = (1, 2, 3, 4)
  split: Literal["databases", "questions"] = "databases"
  test_databases: tuple[str, ...] = ("concert_singer", "pets_1", "tvshow", "voter_1")

  def validate(self, path: str = "config.world.tasks") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(bool(self.levels) and set(self.levels) <= {1, 2, 3, 4}, "levels", "some of 1, 2, 3, 4")

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    return load_spider(self, data.path, train_limit=data.train_size, test_limit=data.test_size)


def load_spider(
  config: SpiderConfig,
  directory: str | os.PathLike[str],
  *,
  train_limit: int | None = None,
  test_limit: int | None = None,
) -> TaskSplits:
  """Tasks of a folder, in the order of its rows; limits count tasks that are kept.

  ``answer`` is the gold query; ``metadata`` holds the path of the ``database``, its name ``db``
  and, where known, the ``level``. The id is the row's number, from FIRST_TEST_ID on in test.

  Raises:
    DataError: neither layout, a missing database, or a gold query that does not run.
  """
  folder = pathlib.Path(directory)
  train, test = _rows(config, folder)
  return TaskSplits(
    train=_tasks(config, train, first_id=0, limit=train_limit),
    test=_tasks(config, test, first_id=FIRST_TEST_ID, limit=test_limit),
  )


def _rows(config: SpiderConfig, folder: pathlib.Path) -> tuple[list[_Row], list[_Row]]:
  """Rows to learn from, and rows to be measured on."""
  if (folder / "dev.json").is_file():
    names = ("train_spider.json", "dev.json")
    train, test = (list(_published_rows(folder, name)) for name in names)
    return train, test
  for name in ("tasks.jsonl.gz", "tasks.jsonl"):
    if (folder / name).is_file():
      train, test = [], []
      for row in _converted_rows(folder, name):
        held_out = row.name in config.test_databases
        if config.split == "questions":
          held_out = row.number % 5 == 4
        (test if held_out else train).append(row)
      return train, test
  raise DataError("the folder holds neither dev.json nor tasks.jsonl(.gz)", folder)


@dataclasses.dataclass(frozen=True)
class _Row:
  number: int
  name: str
  database: pathlib.Path
  question: str
  query: str
  level: int | None


def _published_rows(folder: pathlib.Path, name: str) -> Iterator[_Row]:
  path = folder / name
  try:
    rows = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise DataError(f"cannot be read: {error}", path) from error
  for number, row in enumerate(rows):
    db = require_text(row, "db_id", path, number + 1)
    yield _Row(
      number,
      db,
      folder / "database" / db / f"{db}.sqlite",
      require_text(row, "question", path, number + 1),
      require_text(row, "query", path, number + 1),
      None,
    )


def _converted_rows(folder: pathlib.Path, name: str) -> Iterator[_Row]:
  path = folder / name
  for line, row in read_jsonl(path):
    db = require_text(row, "db", path, line)
    yield _Row(
      line - 1,
      db,
      folder / "databases" / f"{db}.sqlite",
      require_text(row, "question", path, line),
      require_text(row, "gold_sql", path, line),
      _LEVELS.get(row.get("hardness", "")),
    )


def _tasks(
  config: SpiderConfig, rows: Sequence[_Row], *, first_id: int, limit: int | None
) -> list[Task]:
  tasks: list[Task] = []
  databases: dict[pathlib.Path, _Database] = {}
  try:
    for row in rows:
      if limit is not None and len(tasks) >= limit:
        break
      if row.level is not None and row.level not in config.levels:
        continue
      if row.database not in databases:
        databases[row.database] = _Database(row.database)
      result = databases[row.database].run(row.query, config.shown_rows)
      if config.drop_empty and not result.rows:
        continue
      schema = databases[row.database].schema if config.schema else None
      metadata: dict[str, Any] = {"database": str(row.database.resolve()), "db": row.name}
      tasks.append(
        Task(
          id=first_id + row.number,
          prompt=(Message("user", _prompt(row.question, schema)),),
          answer=" ".join(row.query.split()).removesuffix(";").strip(),
          source=SOURCE,
          demonstration=_demonstration(config, row.query, result),
          metadata=metadata if row.level is None else metadata | {"level": row.level},
        )
      )
  finally:
    for database in databases.values():
      database.close()
  return tasks


def _prompt(question: str, schema: str | None) -> str:
  parts = [] if schema is None else [f"Tables:\n{schema}"]
  parts.append(f"{question}\nAnswer with one SQLite query after {mark_answer('').strip()}.")
  return "\n\n".join(parts)


def _demonstration(config: SpiderConfig, query: str, result: _Result) -> tuple[Message, ...]:
  query = " ".join(query.split()).removesuffix(";").strip()
  final = Message("assistant", mark_answer(query))
  if config.demonstration == "none":
    return ()
  if config.demonstration == "direct":
    return (final,)
  call = Message("assistant", "", (ToolCall("sql", {"query": query}),))
  shown = clip(as_table(result.columns, result.rows, result.more), config.shown_characters)
  return (call, Message("tool", shown), final)


@dataclasses.dataclass(frozen=True)
class _Result:
  columns: list[str]
  rows: list[tuple]
  more: bool


class _Database:
  """A trusted database file, opened for reading."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    if not path.is_file():
      raise DataError("no such database", path)
    self._connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    self.schema = "\n".join(self._describe())

  def run(self, query: str, most: int) -> _Result:
    """The first rows that a gold query gives."""
    try:
      cursor = self._connection.execute(query)
      rows = cursor.fetchmany(most + 1)
    except sqlite3.Error as error:
      raise DataError(f"the gold query {query!r} fails: {error}", self._path) from error
    columns = [column[0] for column in cursor.description or ()]
    return _Result(columns, rows[:most], len(rows) > most)

  def close(self) -> None:
    self._connection.close()

  def _describe(self) -> Iterator[str]:
    """``table(column, ...)`` a line, then ``table.column = table.column`` for each foreign key."""
    tables = [
      row[0]
      for row in self._connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
      )
    ]
    links = []
    for table in tables:
      name = '"' + table.replace('"', '""') + '"'
      columns = self._connection.execute(f"PRAGMA table_info({name})").fetchall()
      yield f"{table}({', '.join(column[1] for column in columns)})"
      for link in self._connection.execute(f"PRAGMA foreign_key_list({name})"):
        links.append(f"{table}.{link[3]} = {link[2]}.{link[4] or link[3]}")
    yield from links


@dataclasses.dataclass(frozen=True)
class RecordedSqlEpisode:
  """One recorded episode of InterCode's SQL task (2306.14898).

  Attributes:
    task_id: row of the question in ``tasks.jsonl.gz``.
    question: as asked.
    queries: what was executed, in order.
    observations: what the database answered, as recorded (MySQL's forms); as many as queries.
    rewards: recorded, as many as queries; 0 where none was given yet.
    reward: the episode's, the largest of its turns or that of what was submitted.
    submitted: whether the episode ended by handing in its last result.
  """

  task_id: int
  question: str
  queries: tuple[str, ...]
  observations: tuple[str, ...]
  rewards: tuple[float, ...]
  reward: float
  submitted: bool

  @property
  def messages(self) -> tuple[Message, ...]:
    """The episode as tool calls of ``sql`` and a final answer: its best query, or its last."""
    if not self.queries:
      return ()
    best = max(range(len(self.queries)), key=lambda i: (self.rewards[i], i))
    messages: list[Message] = []
    for query, observation in list(zip(self.queries, self.observations, strict=True))[: best + 1]:
      messages.append(Message("assistant", "", (ToolCall("sql", {"query": query}),)))
      messages.append(Message("tool", observation))
    final = " ".join(self.queries[best].split()).removesuffix(";").strip()
    return (*messages, Message("assistant", mark_answer(final)))


def read_recorded_sql(path: str | os.PathLike[str]) -> list[RecordedSqlEpisode]:
  """The episodes of one file of InterCode's trajectories (``.json`` or ``.json.gz``), by task.

  Raises:
    DataError: not such a file.
  """
  file = pathlib.Path(path)
  try:
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    values = json.loads(raw)
    episodes = [_recorded(episode) for episode in values.values()]
  except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
    raise DataError(f"not a file of recorded SQL episodes: {error!r}", path) from error
  return sorted(episodes, key=lambda episode: episode.task_id)


def _recorded(episode: Mapping[str, Any]) -> RecordedSqlEpisode:
  history = episode["turn_history"]
  queries: list[str] = []
  observations: list[str] = []
  rewards: list[float] = []
  submitted = False
  # An action without an observation was never executed: the model's answer had been blocked.
  for action, observation, reward in zip(
    history["actions"], history["observations"], history["rewards"], strict=False
  ):
    executed = _EXECUTE.match(action)
    if action.strip() == "submit" and queries:
      submitted = True
      rewards[-1] = float(reward)
      continue
    queries.append(executed.group(1) if executed else action)
    observations.append(str(observation))
    rewards.append(float(reward))
  return RecordedSqlEpisode(
    task_id=int(episode["task_id"]),
    question=episode["query"],
    queries=tuple(queries),
    observations=tuple(observations),
    rewards=tuple(rewards),
    reward=float(episode["summary"]["max_reward"]),
    submitted=submitted,
  )
