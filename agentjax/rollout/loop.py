"""Collecting episodes: many at once over one engine, in the order of their addresses."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from agentjax.rewards import RewardGraph
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
from agentjax.rollout.scoring import MOST_THREADS, score
from agentjax.trajectory.record import Task, Trajectory

T = TypeVar("T")
OnFinish = Callable[[Trajectory], None]


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

  The result depends on the weights, the tasks and the run's seed; not on the order of ``tasks``,
  on concurrency, or on which episode ends first. Time-outs are the exception: what meets one
  depends on the machine.

  A fault of an environment or a verifier masks its own trajectory and is logged. An error of the
  engine, the program or ``on_finish`` ends the collection; then, and when the collection is
  cancelled, every environment is closed and every context freed before it propagates.

  Args:
    tasks: what to solve. A task that stands here n times gets n times the samples, in one group.
    step: training step, part of every address.
    samples_per_task: group size.
    player: engine with published weights, tokenizer, settings, seed.
    make_environment: a fresh environment for one episode of a task.
    rewards: scores every trajectory, or every group as soon as its last member ended.
    finished: trajectories that are not to be run again, by address; those of this step that belong
      to ``tasks`` join the result as they are.
    on_finish: called with every new trajectory once it is scored, in the order they end.
    program: what an episode does.
    sampler: how the members of a group come about; None makes them independent of each other. With
      one, a group is scored when it is complete, and sample numbers may leave gaps.

  Returns:
    All trajectories in the order of their addresses (step, task id, sample).
  """
  if samples_per_task < 1:
    raise ValueError(f"samples_per_task={samples_per_task}; allowed: >= 1")
  known = finished or {}
  running = asyncio.Semaphore(player.config.concurrency)
  scoring = asyncio.Semaphore(min(player.config.concurrency, MOST_THREADS))

  async def finish(members: Sequence[Trajectory], task: Task) -> None:
    # Finished members take part in a comparison as copies: they stay as they were recorded.
    scored = [dataclasses.replace(m) if m.address in known else m for m in members]
    async with scoring:
      await score(rewards, scored, task, timeout=player.config.reward_timeout)
    for member in members:
      if on_finish is not None and member.address not in known:
        on_finish(member)

  async def episode(task: Task, address: Address, prefixes: SharedPrefixes) -> Trajectory:
    async with running:
      trajectory = await run_episode(
        program,
        task,
        address,
        player=player,
        make_environment=make_environment,
        prefixes=prefixes,
      )
    if not rewards.needs_groups:
      await finish([trajectory], task)
    return trajectory

  async def group(task: Task, addresses: Sequence[Address]) -> list[Trajectory]:
    prefixes = SharedPrefixes(player.engine)
    size = len(addresses)
    try:
      if sampler is not None:
        members = await sampler.sample(
          Group(task, step, size, player, make_environment, program, prefixes, running, known=known)
        )
        new = [t for t in members if t.address not in known]
        if not rewards.needs_groups:
          await _all([finish([member], task) for member in new])
      else:
        new = await _all([episode(task, a, prefixes) for a in addresses if a not in known])
        members = [*new, *(known[a] for a in addresses if a in known)]
    finally:
      await prefixes.release()
    members = sorted(members, key=lambda t: t.address)
    if new and rewards.needs_groups:
      await finish(members, task)
    return members

  groups = _groups(tasks, step, samples_per_task)
  members = await _all([group(task, addresses) for task, addresses in groups])
  return [trajectory for group_members in members for trajectory in group_members]


def _groups(
  tasks: Sequence[Task], step: int, samples_per_task: int
) -> list[tuple[Task, list[Address]]]:
  """Every distinct task with the addresses of its episodes, by task id."""
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
    # Not gather, which would cancel them too: a second time, in the middle of their clean-up.
    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
  finally:
    for task in running:
      task.cancel()
    await asyncio.wait(running)
  errors = (task.exception() for task in running if not task.cancelled())
  if error := next((e for e in errors if e is not None), None):
    raise error
  return [task.result() for task in running]
