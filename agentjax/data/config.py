"""Settings of the source of tasks."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

from agentjax.config import (
  Config,
  ConfigError,
  FilePath,
  NonNegativeInt,
  PositiveInt,
  Range,
  check,
)
from agentjax.data.jsonl_tasks import load_jsonl
from agentjax.data.mixture import mix
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits


@dataclasses.dataclass(unsafe_hash=True)
class JsonlConfig(TaskSource):
  """Files of rows in the folder ``config.data.path``, a task a row (``data.jsonl_tasks``).

  Attributes:
    name: kept in the tasks as their source.
    train_file, test_file: each a JSONL file (.gz too), a Parquet file, a folder of either Parquet
      or Arrow files (``datasets`` writes them with ``save_to_disk``), or the name of a split,
      whose files are ``SPLIT-*.parquet``, here or in ``data/`` (as in a copy of a Hugging Face
      data set). Parquet and Arrow need the extra ``agentjax[parquet]``. test_file "" is none.
    question_field, answer_field: texts; answer_field "" where rows have no final answer.
    response_field: field with what the assistant answers, for supervised learning; "" reads none.
    messages_field: field with a whole conversation, instead of question and response; its first
      assistant message and everything after it are for supervised learning.
  """

  reads_path = True

  name: str = "jsonl"
  train_file: str = "train.jsonl"
  test_file: str = "test.jsonl"
  question_field: str = "question"
  answer_field: str = "answer"
  response_field: str = ""
  messages_field: str = ""

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    require = self.requirements(path)
    for field in ("name", "train_file", "question_field"):
      require(bool(getattr(self, field)), field, "a name")
    require(
      not (self.response_field and self.messages_field),
      "response_field",
      f"'' with {path}.messages_field={self.messages_field!r}, whose conversation has it",
    )
    require(self.train_file != self.test_file, "test_file", "another file than train_file")

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    parts = (
      (self.train_file, 0, data.train_size),
      (self.test_file, FIRST_TEST_ID, data.test_size),
    )
    return TaskSplits(
      *(
        load_jsonl(
          os.path.join(data.path, name),
          source=self.name,
          first_id=first_id,
          limit=limit,
          question_field=self.question_field,
          answer_field=self.answer_field,
          response_field=self.response_field,
          messages_field=self.messages_field,
        )
        if name
        else []
        for name, first_id, limit in parts
      )
    )


@dataclasses.dataclass(unsafe_hash=True)
class MixtureConfig(TaskSource):
  """Several sources at once.

  Attributes:
    sources: at least two, at most one of which reads ``config.data.path``.
    weights: share of each source, one positive number each; needn't sum to 1. () is equal shares.
  """

  sources: tuple[TaskSource, ...] = ()
  weights: tuple[float, ...] = ()

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    require = self.requirements(path)
    names = tuple(source.chosen for source in self.sources)
    check(
      len(names) >= 2 and len(set(names)) == len(names),
      f"{path}.sources",
      names,
      "two or more different sources",
    )
    check(
      sum(source.reads_path for source in self.sources) <= 1,
      f"{path}.sources",
      names,
      "at most one that reads files, since there is one config.data.path",
    )
    require(
      len(self.weights) in (0, len(self.sources)) and all(w > 0 for w in self.weights),
      "weights",
      f"{len(self.sources)} positive numbers, or ()",
    )

  def check_data(self, data: DataConfig, path: str) -> None:
    super().check_data(data, path)
    for source in self.sources:
      source.check_data(data, path)

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    parts = [source.load(data) for source in self.sources]
    test = [p.test for p in parts]
    weights = self.weights or (1.0,) * len(parts)
    return TaskSplits(
      train=mix([p.train for p in parts], weights, size=data.train_size, first_id=0),
      test=mix(test, weights, size=data.test_size, first_id=FIRST_TEST_ID)
      if data.test_size
      else [],
    )


@dataclasses.dataclass(unsafe_hash=True)
class DataConfig(Config):
  """Training and test tasks.

  Attributes:
    source: reads or generates them; None takes the world's own. Built in are "word_problems",
      "gsm8k", "jsonl", "reasoning_gym", "tfds" and "mixture"; "module:attribute" names a
      ``TaskSplits`` of your own, or a function of this config that returns one.
    path: folder of the files.
    train_size: tasks generated, or at most read; None reads all (files only).
    test_size: likewise for test tasks.
    seed: of generated tasks.
  """

  source: TaskSource | None = None
  path: FilePath | None = None
  train_size: PositiveInt | None = 10_000
  test_size: NonNegativeInt | None = 256
  seed: Annotated[int, Range(0, 2**31, below=True)] = 0

  def validate(self, path: str = "config.data") -> None:
    super().validate(path)
    if self.source is not None:
      self.source.check_data(self, path)


def load_tasks(config: DataConfig) -> TaskSplits:
  """Reads or generates the tasks of a source; not those of a world (``World.tasks``).

  Args:
    config: see DataConfig.

  Raises:
    ConfigError: a setting that cannot be, or a missing extra.
    DataError: data that cannot be read, with file and line.
  """
  config.validate()
  if config.source is None:
    raise ConfigError("config.data.source=None; allowed: a source of tasks.")
  return config.source.load(config)
