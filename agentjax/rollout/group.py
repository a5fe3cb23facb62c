"""The episodes of one task in one step, and the protocol of samplers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from agentjax.rollout.keys import Address
from agentjax.rollout.program import (
  BranchPoint,
  EpisodeProgram,
  MakeEnvironment,
  Player,
  SharedPrefixes,
  TurnWatcher,
  run_episode,
)
from agentjax.trajectory.record import Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Group:
  """The episodes of one task in one step, and the parts that run them.

  Attributes:
    task: what is to be solved.
    step: training step.
    size: episodes the group is to have.
    player, make_environment, program, prefixes: as in ``run_episode``.
    running: semaphore that bounds the episodes at work to ``RolloutConfig.concurrency``.
    known: episodes of the step that were finished earlier, by address, also those of other tasks.
  """

  task: Task
  step: int
  size: int
  player: Player
  make_environment: MakeEnvironment
  program: EpisodeProgram
  prefixes: SharedPrefixes
  running: asyncio.Semaphore
  known: Mapping[Address, Trajectory]

  def address(self, sample: int) -> Address:
    return (self.step, self.task.id, sample)

  async def episode(
    self,
    sample: int,
    *,
    program: EpisodeProgram | None = None,
    start: BranchPoint | None = None,
    watcher: TurnWatcher | None = None,
    branch: int | None = None,
  ) -> Trajectory:
    """One episode, as ``run_episode`` has it, when there is a place for it."""
    async with self.running:
      return await run_episode(
        program or self.program,
        self.task,
        self.address(sample),
        player=self.player,
        make_environment=self.make_environment,
        prefixes=self.prefixes,
        start=start,
        watcher=watcher,
        branch=branch,
      )

  def finished(self) -> list[Trajectory]:
    """The episodes of this group that are known, in the order of their addresses."""
    mine = (t for a, t in self.known.items() if a[:2] == (self.step, self.task.id))
    return sorted(mine, key=lambda t: t.address)

  def settle(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The group in the order of addresses; members that are known stay as recorded."""
    members = [self.known.get(t.address, t) for t in trajectories]
    return sorted(members, key=lambda t: t.address)


class Sampler(Protocol):
  """Makes the members of a group.

  The result must not depend on time, unless the sampler's documentation says so. A partly known
  group is made again as a whole, and known members replace those of the same address.
  """

  async def sample(self, group: Group) -> list[Trajectory]:
    """All members, those known included, in the order of their addresses; not yet scored."""
    ...


class Crew:
  """Coroutines that run at the same time and may bring in more of them."""

  def __init__(self) -> None:
    self._tasks: set[asyncio.Task[None]] = set()

  def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begins ``work``; ``join`` waits for it."""
    task = asyncio.ensure_future(work)
    self._tasks.add(task)
    return task

  async def join(self) -> None:
    """Until all have ended. The first error, or cancellation, ends the others before it propagates.

    A task that was cancelled alone counts as ended.
    """
    try:
      while self._tasks:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._tasks -= done
        errors = [task.exception() for task in done if not task.cancelled()]
        if error := next((e for e in errors if e is not None), None):
          raise error
    finally:
      for task in self._tasks:
        task.cancel()
      if self._tasks:
        await asyncio.wait(self._tasks)
        for task in self._tasks:
          if not task.cancelled():
            task.exception()  # read: one error is enough
        self._tasks.clear()


async def side_by_side(episodes: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
  """Episodes that run at the same time, in their order; the first error ends the others."""
  crew, ended = Crew(), dict[int, Trajectory]()

  async def run(place: int, episode: Coroutine[Any, Any, Trajectory]) -> None:
    ended[place] = await episode

  for place, episode in enumerate(episodes):
    crew.start(run(place, episode))
  await crew.join()
  return [ended[place] for place in range(len(episodes))]
