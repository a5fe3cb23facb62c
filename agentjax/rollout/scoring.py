"""Scoring away from the event loop: a slow verifier holds up neither the engine nor the tools."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

from agentjax.faults import FAULT, Fault, Owner
from agentjax.places import Clock, Places, owned_by, wait_within
from agentjax.rewards.graph import (
  RewardGraph,
  emptied,
  find_culprits,
  leave_without_verdict,
)
from agentjax.trajectory.record import Reward, Task, Trajectory
from agentjax.trajectory.seats import learning_agents, settle, view

MOST_THREADS = 256  # that score at one time
_places = Places(MOST_THREADS)


async def score(
  rewards: RewardGraph, trajectories: Sequence[Trajectory], task: Task, *, timeout: float
) -> None:
  """Fills the rewards of some trajectories of one task, together where the graph compares them.

  With several agents, each that learns is scored separately and compared with those of its name.
  """
  alone = [t for t in trajectories if not t.agents]
  if len(alone) == len(trajectories):
    return await _score_role(rewards, alone, task, timeout)
  roles: dict[str, dict[int, Trajectory]] = collections.defaultdict(dict)
  for i, trajectory in enumerate(trajectories):
    for agent in learning_agents(trajectory):
      roles[agent][i] = view(trajectory, agent)
  sets = [alone] if alone or not roles else []
  sets += [list(members.values()) for members in roles.values()]
  await asyncio.gather(*(_score_role(rewards, own, task, timeout) for own in sets))
  for i, trajectory in enumerate(trajectories):
    if trajectory.agents:
      settle(trajectory, {agent: members[i] for agent, members in roles.items() if i in members})


async def _score_role(
  rewards: RewardGraph, trajectories: Sequence[Trajectory], task: Task, timeout: float
) -> None:
  """``score`` of trajectories of one agent.

  Each trajectory is scored in a thread and event loop of its own, so scorers may block: neither the
  engine nor the other members of a group wait for them. They must be safe to run in several threads
  at once, and must not keep objects that are bound to an event loop.

  After ``timeout`` seconds, not counting the wait for places, the work is cancelled. A thread that
  ignores this is abandoned and can no longer change the trajectories. Then each episode is compared
  with an empty one. If an episode is slow and the empty one is not, it gets 0 (or less, if an empty
  answer is worth less), and the others are scored again without it. If the empty one is slow too,
  the verifier is at fault: see ``leave_without_verdict``.
  """
  if await _scored(rewards, trajectories, task, timeout):
    return
  message = f"scoring took longer than rollout.reward_timeout={timeout:g} s"

  async def works(members: Sequence[Trajectory]) -> bool:
    return await _scored(rewards, [dataclasses.replace(m) for m in members], task, timeout)

  alive = [t for t in trajectories if not t.status.broken]
  culprits = await find_culprits(alive, works)
  kept = [emptied(t) if i in (culprits or ()) else t for i, t in enumerate(alive)]
  if culprits is None or not await _scored(rewards, kept, task, timeout):
    fault = Fault(Owner.VERIFIER, "time", message)
    for trajectory in trajectories:
      if trajectory.status.broken:
        trajectory.reward = Reward.invalid(message)
      else:
        leave_without_verdict(trajectory, fault)
    return
  for index in culprits:
    found = kept[index]
    alive[index].reward = Reward(min(0.0, found.reward.value or 0.0))
    alive[index].reward_parts = {
      name: Reward(min(0.0, part.value or 0.0)) for name, part in found.reward_parts.items()
    }
    alive[index].metadata[FAULT] = Fault(Owner.POLICY, "time", message).to_dict()
  for trajectory in trajectories:
    if trajectory.status.broken:
      trajectory.reward = Reward.invalid("the episode failed")


async def _scored(
  rewards: RewardGraph, trajectories: Sequence[Trajectory], task: Task, timeout: float
) -> bool:
  """Whether the trajectories were scored in time; else they are as they were."""
  copies = [
    dataclasses.replace(
      t,
      reward_parts=dict(t.reward_parts),
      turn_rewards=dict(t.turn_rewards),
      metadata=dict(t.metadata),
    )
    for t in trajectories
  ]

  clock = Clock()
  running = asyncio.ensure_future(_score_apart(rewards, copies, task, clock))
  try:
    done = await wait_within(running, timeout, clock)
  finally:
    running.cancel()
    await asyncio.wait({running})
  if not done:
    return False
  await running
  for trajectory, copy in zip(trajectories, copies, strict=True):
    for name in ("reward", "reward_parts", "turn_rewards", "status", "metadata"):
      setattr(trajectory, name, getattr(copy, name))
  return True


async def _score_apart(
  rewards: RewardGraph, members: Sequence[Trajectory], task: Task, clock: Clock
) -> None:
  """Scores in threads, where members do not wait for each other until they are compared."""
  owner = members[0].address if members else None
  if len(members) == 1:  # nothing to hold up: one thread does both

    async def both() -> None:
      await rewards.score_parts(members[0], task)
      await rewards.compare(members, task)

    return await _in_thread(both, owner, clock)
  parts = (functools.partial(rewards.score_parts, member, task) for member in members)
  await asyncio.gather(*(_in_thread(part, owner, clock) for part in parts))
  await _in_thread(functools.partial(rewards.compare, members, task), owner, clock)


class _Worker(threading.Thread):
  """A thread with an event loop. It is a daemon, so a blocked one dies with the process."""

  idle: list[_Worker] = []  # those that wait for work

  def __init__(self) -> None:
    super().__init__(name="scoring", daemon=True)
    self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    self.start()

  def run(self) -> None:
    with asyncio.Runner() as runner:
      while True:
        job = self.jobs.get()
        try:
          result = runner.run(job.run())
        except BaseException as error:
          outcome = functools.partial(job.future.set_exception, error)
        else:
          outcome = functools.partial(job.future.set_result, result)
        self.idle.append(self)
        outcome()


class _Job:
  """Work for a worker, which may be cancelled from another thread."""

  def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]):
    self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
    self.future.set_running_or_notify_cancel()  # it ends with its work, not before
    self._work = work
    self._lock = threading.Lock()
    self._cancelled = False
    self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

  async def run(self) -> None:
    task = asyncio.current_task()
    assert task is not None
    with self._lock:
      if self._cancelled:
        raise asyncio.CancelledError
      self._running = (asyncio.get_running_loop(), task)
    try:
      await self._work()
    finally:
      with self._lock:
        self._running = None

  def cancel(self) -> None:
    with self._lock:
      self._cancelled = True
      if self._running is not None:
        loop, task = self._running
        loop.call_soon_threadsafe(task.cancel)


async def _in_thread(
  work: Callable[[], Coroutine[Any, Any, None]], owner: Hashable, clock: Clock
) -> None:
  """``work()`` in the event loop of an idle worker, or of a new one; cancelled with its caller.

  Waiting for the thread, and for places that the work takes for ``owner``, stops the clock.
  """

  async def run() -> None:
    with owned_by(owner), clock:
      await work()

  with clock:
    async with _places.one():
      try:
        worker = _Worker.idle.pop()
      except IndexError:
        worker = _Worker()
      job = _Job(run)
      worker.jobs.put(job)
      try:
        await asyncio.wrap_future(job.future)
      except asyncio.CancelledError:
        job.cancel()
        raise
