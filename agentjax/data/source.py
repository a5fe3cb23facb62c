"""A source of tasks as a choice: settings that read or generate them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from agentjax.config import check
from agentjax.data.splits import TaskSplits
from agentjax.names import Adopted, Choice, check_callable, wrong

if TYPE_CHECKING:
  from agentjax.data.config import DataConfig

_HERE = "agentjax.data"


@dataclasses.dataclass(unsafe_hash=True)
class TaskSource(Choice):
  """Settings of a source, which reads or generates tasks.

  ``reads_path`` says whether it reads files of ``config.data.path``; otherwise it generates tasks,
  and sizes must be given.
  """

  group = "agentjax.sources"
  adopts = "a TaskSplits, or a function of a DataConfig that returns one"
  reads_path: ClassVar[bool] = False

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "word_problems": "agentjax.worlds.question.word_problems:WordProblemConfig",
      "gsm8k": "agentjax.worlds.question.gsm8k:Gsm8kConfig",
      "jsonl": f"{_HERE}.config:JsonlConfig",
      "reasoning_gym": "agentjax.adapters.reasoning_gym.tasks:ReasoningGymConfig",
      "tfds": "agentjax.adapters.tfds:TfdsConfig",
      "mixture": f"{_HERE}.config:MixtureConfig",
    }

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    if not isinstance(found, TaskSplits):
      check_callable(found, f"{path}={name!r}", cls.adopts)
    return OwnSource(name, found)  # type: ignore[return-value]

  def check_data(self, data: DataConfig, path: str) -> None:
    """Raises ConfigError if ``data`` lacks a field that this source needs; ``path`` names
    ``data``."""
    if self.reads_path:
      check(
        bool(data.path),
        f"{path}.path",
        data.path,
        f"the folder that source {self.chosen!r} reads; set --{path}.path=DIR",
      )
      return
    for name in ("train_size", "test_size"):
      size = getattr(data, name)
      check(size is not None, f"{path}.{name}", size, f"a number, for source {self.chosen!r}")

  def load(self, data: DataConfig) -> TaskSplits:
    """The tasks.

    Args:
      data: sizes, seed and folder; ``check_data`` has passed.

    Raises:
      ConfigError: an impossible setting, or a missing extra.
      DataError: data that cannot be read, with file and line.
    """
    raise NotImplementedError(f"{type(self).__name__} must define load()")


@dataclasses.dataclass(unsafe_hash=True)
class OwnSource(Adopted, TaskSource):
  """Tasks of your own: a TaskSplits, or a function that makes one."""

  def check_data(self, data: DataConfig, path: str) -> None:
    pass

  def load(self, data: DataConfig) -> TaskSplits:
    found = self.found if isinstance(self.found, TaskSplits) else self.found(data)
    if not isinstance(found, TaskSplits):
      raise wrong(self.name, "config.data.source", found, self.adopts)
    return found
