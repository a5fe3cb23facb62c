"""A kind of environment, ready for any task: what ``config.environment.kind`` chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping

from agentjax.envs.environment import Environment
from agentjax.tools.protocol import Tool
from agentjax.trajectory.record import Reward, Task, Trajectory

Scorer = Callable[[Trajectory, Task], Reward | float | Awaitable[Reward | float]]


async def _nothing() -> None:
  pass


@dataclasses.dataclass(frozen=True)
class World:
  """What a run needs of its environment.

  Attributes:
    make: the environment of one episode of a task.
    tools: what every episode offers; prompts, demonstrations and statistics are made with them.
      Those of a task's own may differ in what they hold, never in name, description or parameters.
    scorers: reward parts that judge this kind of task, for ``config.reward.parts``.
    close: frees what the episodes share.
  """

  make: Callable[[Task], Environment]
  tools: tuple[Tool, ...]
  scorers: Mapping[str, Scorer] = dataclasses.field(default_factory=dict)
  close: Callable[[], Awaitable[None]] = _nothing
