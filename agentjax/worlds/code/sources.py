"""Where functions to be written come from, as a choice."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

from agentjax.config import NonNegativeInt
from agentjax.data import DataConfig, TaskSplits
from agentjax.data.source import TaskSource
from agentjax.worlds.code.tasks import load_mbpp, load_quixbugs

_HERE = "agentjax.worlds.code"


@dataclasses.dataclass(unsafe_hash=True)
class CodeTaskSource(TaskSource):
  """Settings of a source of function-writing tasks."""

  group = "agentjax.worlds.code.sources"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "function_tasks": f"{_HERE}.function_tasks:FunctionTaskConfig",
      "code_tasks": f"{_HERE}.sources:CodeTasksConfig",
    }


@dataclasses.dataclass(unsafe_hash=True)
class CodeTasksConfig(CodeTaskSource):
  """``mbpp.jsonl``, and for its tests perhaps ``quixbugs.jsonl``, in ``config.data.path``.

  Attributes:
    test: whose tasks are the test tasks; MBPP's own split, or QuixBugs.
    shown_tests: tests that are shown in the prompt; one at least is kept back.
  """

  reads_path = True

  test: Literal["mbpp", "quixbugs"] = "mbpp"
  shown_tests: NonNegativeInt = 1

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    mbpp = load_mbpp(
      os.path.join(data.path, "mbpp.jsonl"),
      shown_tests=self.shown_tests,
      train_limit=data.train_size,
      test_limit=data.test_size,
    )
    if self.test == "mbpp":
      return mbpp
    quixbugs = load_quixbugs(
      os.path.join(data.path, "quixbugs.jsonl"),
      shown_tests=self.shown_tests,
      limit=data.test_size,
    )
    return TaskSplits(mbpp.train, quixbugs.test)
