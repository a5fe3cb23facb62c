"""A kind of environment, ready for any task: what ``config.environment.kind`` chooses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

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


class Places:
  """Bounds how many verdicts run at once; they come from many threads and event loops."""

  def __init__(self, count: int):
    self._free = threading.BoundedSemaphore(count)

  @contextlib.asynccontextmanager
  async def place(self) -> AsyncIterator[None]:
    """Waits for a place and holds it."""
    while not self._free.acquire(blocking=False):
      await asyncio.sleep(0.005)
    try:
      yield
    finally:
      self._free.release()
