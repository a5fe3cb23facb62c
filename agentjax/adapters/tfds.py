"""Tasks of a prepared TensorFlow Datasets folder, read without TensorFlow (``tfds.data_source``).

The data set must be stored for random access, as array_record: ``tfds build
--file_format=array_record`` makes it so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, overload

from agentjax.config import ConfigError, check
from agentjax.data.config import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.trajectory.record import Message, Task


@dataclasses.dataclass(unsafe_hash=True)
class TfdsConfig(TaskSource):
  """Where a question and its answer are in a TFDS data set; its folder is ``config.data.path``.

  Attributes:
    name: data set as TFDS writes it: "name", "name/config" or "name/config:1.0.0".
    train_split, test_split: TFDS splits; slices such as "train[:90%]" are allowed.
    question_field, answer_field: features of an example, text or numbers.
  """

  reads_path = True

  name: str = ""
  train_split: str = "train"
  test_split: str = "test"
  question_field: str = "question"
  answer_field: str = "answer"

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    require = self.requirements(path)
    for field in dataclasses.fields(self):
      if field.name != "name":
        value = getattr(self, field.name)
        check(bool(value), f"{path}.{field.name}", value, "a name")
    require(self.train_split != self.test_split, "test_split", "another split than train_split")

  def check_data(self, data: DataConfig, path: str) -> None:
    super().check_data(data, path)
    check(bool(self.name), f"{path}.source.name", self.name, "a TFDS data set's name")

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    return load_tfds(self, data.path, train_limit=data.train_size, test_limit=data.test_size)


class TfdsTasks(Sequence[Task]):
  """One split as tasks, each read from disk when asked for.

  Args:
    config: data set and field names.
    data_dir: folder that holds the prepared data set.
    split: TFDS split.
    first_id: id of the first example's task.
    limit: at most this many examples, from the start; None takes all.

  Raises:
    ConfigError: tensorflow_datasets is missing, or the data set has no such field or split.
    DataError: there is no such data set in ``data_dir``, it cannot be read at random, or (on
      reading) an example's question or answer is empty.
  """

  def __init__(
    self,
    config: TfdsConfig,
    *,
    data_dir: str | os.PathLike[str],
    split: str,
    first_id: int = 0,
    limit: int | None = None,
  ):
    self._config = config
    self._data_dir = os.fspath(data_dir)
    self._split = split
    self._first_id = first_id
    self._source = _open(config, self._data_dir, split)
    size = len(self._source)
    self._size = size if limit is None else min(size, limit)
    if size == 0:
      raise DataError(f"split {split!r} of {config.name!r} is empty", self._data_dir)

  def __len__(self) -> int:
    return self._size

  @overload
  def __getitem__(self, index: int) -> Task: ...

  @overload
  def __getitem__(self, index: slice) -> list[Task]: ...

  def __getitem__(self, index: int | slice) -> Task | list[Task]:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(self._size))]
    if not -self._size <= index < self._size:
      raise IndexError(f"task {index} of {self._size}")
    index %= self._size
    example = self._source[index]
    return Task(
      id=self._first_id + index,
      prompt=(Message("user", self._text(example, self._config.question_field, index)),),
      answer=self._text(example, self._config.answer_field, index).strip(),
      source=f"tfds/{self._config.name}",
    )

  def _text(self, example: dict[str, Any], field: str, index: int) -> str:
    value = example[field]
    text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    if not text.strip():
      raise DataError(
        f"example {index} of split {self._split!r}: {field!r} is empty", self._data_dir
      )
    return text


def load_tfds(
  config: TfdsConfig,
  data_dir: str | os.PathLike[str],
  *,
  train_limit: int | None = None,
  test_limit: int | None = None,
) -> TaskSplits:
  """The two splits of the config."""
  check(bool(config.name), "config.data.source.name", config.name, "the name of a TFDS data set")
  return TaskSplits(
    train=TfdsTasks(config, data_dir=data_dir, split=config.train_split, limit=train_limit),
    test=TfdsTasks(
      config, data_dir=data_dir, split=config.test_split, first_id=FIRST_TEST_ID, limit=test_limit
    ),
  )


def _open(config: TfdsConfig, data_dir: str, split: str) -> Sequence[dict[str, Any]]:
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise ConfigError(
      "config.data.source='tfds' needs tensorflow_datasets and array_record; install the extra: "
      "pip install 'agentjax[tfds]'"
    ) from error
  try:
    builder = tfds.builder(config.name, data_dir=data_dir, try_gcs=False)
  except (tfds.core.DatasetNotFoundError, ValueError, OSError) as error:
    reason = next(iter(str(error).splitlines()), "")  # TFDS goes on to list all it knows
    raise DataError(f"no prepared TFDS data set {config.name!r}: {reason}", data_dir) from error
  # Without a prepared folder TFDS would go and download.
  if not builder.info.splits:
    raise DataError(f"the TFDS data set {config.name!r} is not prepared there", data_dir)
  for name in (config.question_field, config.answer_field):
    features = builder.info.features
    check(
      features is not None and name in features,
      "config.data.source field",
      name,
      ", ".join(features or ()),
    )
  try:
    return builder.as_data_source(split=split)
  except NotImplementedError as error:
    raise DataError(
      f"the TFDS data set {config.name!r} is stored as {builder.info.file_format}, which cannot "
      "be read at random; prepare it with file_format=array_record",
      data_dir,
    ) from error
  except (ValueError, KeyError) as error:
    raise ConfigError(
      f"config.data.source split {split!r}; allowed: {', '.join(builder.info.splits)} or a slice "
      f"of one ({error})"
    ) from error
