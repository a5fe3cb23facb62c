"""Two sequences of tasks: for training and for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.trajectory.record import Task

FIRST_TEST_ID = 1 << 30
"""Ids of test tasks start here, so that no test task shares its randomness with a train task."""


@dataclasses.dataclass(frozen=True)
class TaskSplits:
  """Train tasks have ids below FIRST_TEST_ID, test tasks ids from there on."""

  train: Sequence[Task]
  test: Sequence[Task]
