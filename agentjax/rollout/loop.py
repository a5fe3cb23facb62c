"""Collecting episodes: many at once over one engine, in the order of their addresses."""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from agentjax.rewards import RewardGraph
from agentjax.rollout import keys
from agentjax.rollout.group import Group, Sampler
from agentjax.rollout.keys import Address
from agentjax.rollout.program import (
  EpisodeProgram,
  MakeEnvironment,
  Player,
  SharedPrefixes,
  run_episode,
  tool_episode,
)
from agentjax.rollout.scoring import score
from agentjax.trajectory.record import Task, Trajectory

T = TypeVar("T")
OnFinish = Callable[[Trajectory], None]


@dataclasses.dataclass
class GroupPlayer:
  """Plays groups of episodes and scores them; all groups share its bound on concurrency.

  Attributes:
    player: engine with published weights, tokenizer, settings, seed.
    make_environment: a fresh environment for one episode of a task.
    rewards: scores every trajectory, or every group as soon as its last member ended.
    on_finish: called with every new trajectory once it is scored, in the order they end.
    program: what an episode does.
    sampler: how the members of a group come about; None makes them independent of each other. With
      one, a group is scored when it is complete, and sample numbers may leave gaps.
    baseline: plays one more episode of every group, sample ``keys.BASELINE``; None plays none.
    numbers: of settings and ``step``: settings with the numbers that their schedules have at that
      training step; None if the settings have none.
  """

  player: Player
  make_environment: MakeEnvironment
  rewards: RewardGraph
  on_finish: OnFinish | None = None
  program: EpisodeProgram = tool_episode
  sampler: Sampler | None = None
  baseline: Player | None = None
  numbers: Callable[..., Any] | None = None

  def __post_init__(self) -> None:
    self._running = asyncio.Semaphore(self.player.config.concurrency)

  def at(self, step: int) -> GroupPlayer:
    """One for a group that begins with the weights, and so with the numbers, of a step."""
    if self.numbers is None:
      return self
    now, numbers = copy.copy(self), functools.partial(self.numbers, step=step)
    now.player, now.rewards = self.player.at(numbers), self.rewards.at(numbers)
    now.baseline = None if self.baseline is None else self.baseline.at(numbers)
    return now

  async def play(
    self, task: Task, addresses: Sequence[Address], finished: Mapping[Address, Trajectory]
  ) -> list[Trajectory]:
    """The episodes of a group, by address; those in ``finished`` are included unchanged."""
    prefixes = SharedPrefixes(self.player.engine)
    sampled = {a: t for a, t in finished.items() if a[2] != keys.BASELINE}
    try:
      if self.sampler is None:
        playing = self._independent(task, addresses, sampled, prefixes)
      else:
        playing = self._sampled(self.sampler, task, addresses, sampled, prefixes)
      beside = self._greedy(task, (*addresses[0][:2], keys.BASELINE), finished, prefixes)
      members = [t for some in await _all([playing, beside]) for t in some]
    finally:
      await prefixes.release()
    members.sort(key=lambda t: t.address)
    if self.rewards.needs_groups and any(t.address not in finished for t in members):
      await self._finish(members, task, finished)
    return members

  async def _independent(
    self,
    task: Task,
    addresses: Sequence[Address],
    finished: Mapping[Address, Trajectory],
    prefixes: SharedPrefixes,
  ) -> list[Trajectory]:
    player = self.player
    new = [self._episode(player, task, a, prefixes) for a in addresses if a not in finished]
    return [*await _all(new), *(finished[a] for a in addresses if a in finished)]

  async def _greedy(
    self,
    task: Task,
    address: Address,
    finished: Mapping[Address, Trajectory],
    prefixes: SharedPrefixes,
  ) -> list[Trajectory]:
    if self.baseline is None:
      return []
    if address in finished:
      return [finished[address]]
    return [await self._episode(self.baseline, task, address, prefixes)]

  async def _sampled(
    self,
    sampler: Sampler,
    task: Task,
    addresses: Sequence[Address],
    finished: Mapping[Address, Trajectory],
    prefixes: SharedPrefixes,
  ) -> list[Trajectory]:
    group = Group(
      task,
      addresses[0][0],
      len(addresses),
      self.player,
      self.make_environment,
      self.program,
      prefixes,
      self._running,
      known=finished,
    )
    members = await sampler.sample(group)
    if not self.rewards.needs_groups:
      new = [t for t in members if t.address not in finished]
      await _all([self._finish([t], task, finished) for t in new])
    return members

  async def _episode(
    self, player: Player, task: Task, address: Address, prefixes: SharedPrefixes
  ) -> Trajectory:
    async with self._running:
      trajectory = await run_episode(
        self.program,
        task,
        address,
        player=player,
        make_environment=self.make_environment,
        prefixes=prefixes,
      )
    if not self.rewards.needs_groups:
      await self._finish([trajectory], task, {})
    return trajectory

  async def _finish(
    self, members: Sequence[Trajectory], task: Task, finished: Mapping[Address, Trajectory]
  ) -> None:
    # Finished members take part in a comparison as copies: they stay as they were recorded.
    scored = [dataclasses.replace(m) if m.address in finished else m for m in members]
    await score(self.rewards, scored, task, timeout=self.player.config.reward_timeout)
    for member in members:
      if self.on_finish is not None and member.address not in finished:
        self.on_finish(member)


async def collect(
  tasks: Sequence[Task],
  *,
  step: int,
  samples_per_task: int,
  player: Player,
  make_environment: MakeEnvironment,
  rewards: RewardGraph,
  finished: Mapping[Address, Trajectory] | None = None,
  on_finish: OnFinish | None = None,
  program: EpisodeProgram = tool_episode,
  sampler: Sampler | None = None,
) -> list[Trajectory]:
  """Runs ``samples_per_task`` episodes of every task and scores them.

  The result depends on the weights, the tasks and the run's seed; not on the order of ``tasks``, on
  concurrency, or on which episode ends first. Time-outs are the exception: they depend on the
  machine.

  A fault of an environment or a verifier masks its own trajectory and is logged. An error of the
  engine, the program or ``on_finish`` ends the collection; then, and when the collection is
  cancelled, every environment is closed and every context freed before it propagates.

  Args:
    tasks: what to solve. A task that is listed n times gets n times the samples, in one group.
    step: training step, part of every address.
    samples_per_task: group size.
    player, make_environment, rewards, on_finish, program, sampler: see ``GroupPlayer``.
    finished: trajectories that are not to be run again, by address; those of this step that belong
      to ``tasks`` join the result as they are.

  Returns:
    All trajectories in the order of their addresses (step, task id, sample).
  """
  groups = groups_of(tasks, step, samples_per_task)
  playing = GroupPlayer(player, make_environment, rewards, on_finish, program, sampler)
  members = await _all([playing.play(task, at, finished or {}) for task, at in groups])
  return [trajectory for group_members in members for trajectory in group_members]


def groups_of(
  tasks: Sequence[Task], step: int, samples_per_task: int
) -> list[tuple[Task, list[Address]]]:
  """Every distinct task with the addresses of its episodes, by task id."""
  if samples_per_task < 1:
    raise ValueError(f"samples_per_task={samples_per_task}; allowed: >= 1")
  by_id: dict[int, Task] = {}
  for task in tasks:
    if by_id.setdefault(task.id, task) != task:
      raise ValueError(
        f"two tasks have the id {task.id} (sources {by_id[task.id].source!r} and "
        f"{task.source!r}); ids address all randomness, so give every task of a run its own"
      )
  counts = collections.Counter(task.id for task in tasks)
  return [
    (by_id[i], [(step, i, sample) for sample in range(samples_per_task * counts[i])])
    for i in sorted(by_id)
  ]


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
  """Results in order. The first error, or cancellation, ends the others before it propagates."""
  if not coroutines:
    return []
  running = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
  try:
    # Not gather: it would cancel them a second time, in the middle of their clean-up.
    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
  finally:
    for task in running:
      task.cancel()
    await asyncio.wait(running)
  errors = (task.exception() for task in running if not task.cancelled())
  if error := next((e for e in errors if e is not None), None):
    raise error
  return [task.result() for task in running]
