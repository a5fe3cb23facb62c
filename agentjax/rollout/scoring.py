"""Scoring away from the event loop: a slow verifier holds up neither the engine nor the tools."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from agentjax.rewards import RewardGraph
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

T = TypeVar("T")

MOST_THREADS = 256  # that score at one time; a collection lets no more begin


async def score(
  rewards: RewardGraph, trajectories: Sequence[Trajectory], task: Task, *, timeout: float
) -> None:
  """Fills the rewards of some trajectories of one task, together where the graph compares them.

  Runs in another thread and event loop, so scorers may block. They must be safe to run in several
  threads at once, and must not keep objects that are bound to an event loop. After ``timeout``
  seconds the rewards are invalid and the status is VERIFIER_ERROR; the thread is left behind and
  can no longer change the trajectories.
  """
  copies = [
    dataclasses.replace(
      t,
      reward_parts=dict(t.reward_parts),
      turn_rewards=dict(t.turn_rewards),
      metadata=dict(t.metadata),
    )
    for t in trajectories
  ]

  async def run() -> None:
    if rewards.needs_groups:
      await rewards.score_group(copies, task)
    else:
      for copy in copies:
        await rewards.score(copy, task)

  try:
    await asyncio.wait_for(_in_thread(run), timeout)
  except TimeoutError:
    for trajectory in trajectories:
      if not trajectory.status.broken:
        trajectory.status = Status.VERIFIER_ERROR
      trajectory.reward = Reward.invalid(
        f"scoring took longer than rollout.reward_timeout={timeout:g} s"
      )
    return
  for trajectory, copy in zip(trajectories, copies, strict=True):
    for name in ("reward", "reward_parts", "turn_rewards", "status", "metadata"):
      setattr(trajectory, name, getattr(copy, name))


class _Worker(threading.Thread):
  """A thread with an event loop. Daemon: one that never comes back dies with the process."""

  idle: list[_Worker] = []  # those that wait for work

  def __init__(self) -> None:
    super().__init__(name="scoring", daemon=True)
    self.jobs: queue.SimpleQueue[tuple[concurrent.futures.Future, Callable]] = queue.SimpleQueue()
    self.start()

  def run(self) -> None:
    with asyncio.Runner() as runner:
      while True:
        future, work = self.jobs.get()
        try:
          result = runner.run(work())
        except BaseException as error:
          outcome = functools.partial(future.set_exception, error)
        else:
          outcome = functools.partial(future.set_result, result)
        self.idle.append(self)
        outcome()


async def _in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
  """``work()`` in the event loop of an idle worker, or of a new one."""
  try:
    worker = _Worker.idle.pop()
  except IndexError:
    worker = _Worker()
  future: concurrent.futures.Future[T] = concurrent.futures.Future()
  future.set_running_or_notify_cancel()  # it cannot be cancelled: the thread runs to its end
  worker.jobs.put((future, work))
  return await asyncio.wrap_future(future)
