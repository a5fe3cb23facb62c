"""Runs the tasks of a board, as many at once as its agents can do, and survives its own death.

The board is written to one file before a task starts and after it ended, and a second process
cannot open it. A scheduler that opens the file of a dead one goes on: what had ended stays, what
waited waits, and what was at work starts again (``Board.recover``).
"""

from __future__ import annotations

import asyncio
import collections
import fcntl
import json
import logging
import os
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Self

from agentjax.config import ConfigError
from agentjax.faults import describe
from agentjax.files import write_atomically
from agentjax.recipes.semaclaw.graph import Board, Parent, TaskSpec, TaskStatus, TeamTask

_log = logging.getLogger(__name__)

RunTask = Callable[[TeamTask, str], Awaitable[str]]  # a task and its prompt -> its result


class Scheduler:
  """Runs a board; use it as an async context manager.

  Args:
    board: with its roster; what the file holds is loaded into it.
    run: does a task. What it raises becomes the task's error.
    path: file of the board; None keeps none.
    clock: seconds since 1970.
  """

  def __init__(
    self,
    board: Board,
    run: RunTask,
    path: str | os.PathLike[str] | None = None,
    *,
    clock: Callable[[], float] = time.time,
  ):
    self.board = board
    self._run, self._clock = run, clock
    self._path = None if path is None else pathlib.Path(path)
    self._lock: IO[str] | None = None
    # Who works on a task, by its id; a task that was cancelled may still clean up.
    self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
    self._changed = asyncio.Condition()
    self._failure: BaseException | None = None
    self._closing = False

  def open(self) -> None:
    """Takes the file of the board for this process and loads it; entering does so by itself.

    Raises:
      ConfigError: another process has it, or it is none.
    """
    if self._path is not None and self._lock is None:
      self._open(self._path)

  async def __aenter__(self) -> Self:
    self.open()
    self.board.recover(now=self._clock())
    self._save()
    self._start_ready()
    return self

  async def __aexit__(self, *_: object) -> None:
    self._closing = True
    running = [work for _, work in self._running.values()]
    for work in running:
      work.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    if self._lock is not None:
      self._lock.close()

  def add(
    self, admin: str, goal: str, specs: Sequence[TaskSpec], *, timeout: float = 900.0
  ) -> Parent:
    """A new parent, whose tasks start as soon as they can; see ``Board.add``."""
    parent = self.board.add(admin, goal, specs, now=self._clock(), timeout=timeout)
    self._save()
    self._start_ready()
    return parent

  async def wait(self, parent: str, label: str | None = None) -> list[TeamTask]:
    """Until one task of a parent, or all of them, have ended; gives them.

    Raises:
      GraphError: there is no such parent or task.
    """
    if label is None:
      tasks = list(self.board.parent(parent).tasks.values())
    else:
      tasks = [self.board.task(parent, label)]
    async with self._changed:
      await self._changed.wait_for(
        lambda: self._failure is not None or all(task.ended for task in tasks)
      )
    if self._failure is not None:
      raise self._failure
    return tasks

  def pause(self, admin: str) -> None:
    """No further task of an admin starts; those at work go on."""
    self.board.paused.add(admin)
    self._save()

  def resume(self, admin: str) -> None:
    """Inverse of ``pause``."""
    self.board.paused.discard(admin)
    self._save()
    self._start_ready()

  async def cancel(self, admin: str) -> None:
    """Ends all tasks of an admin, those at work too."""
    loop = asyncio.get_running_loop()
    for task in self.board.cancel(admin, now=self._clock()):
      if task.id in self._running:
        # After its first step, which is scheduled already: without it the coroutine would never
        # be entered, and its agent never be free again.
        loop.call_soon(self._running[task.id][1].cancel)
    await self._note_change()

  def forget(self) -> None:
    """Drops parents that were done long ago; see ``Board.forget``."""
    if self.board.forget(now=self._clock()):
      self._save()

  def _open(self, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = path.with_name(f".{path.name}.lock").open("w")
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it at our death
    except BlockingIOError as error:
      self._lock.close()
      self._lock = None
      raise ConfigError(
        f"{path} is in use by another process; stop it, or give the team another file."
      ) from error
    if path.exists():
      try:
        self.board.set_json(json.loads(path.read_bytes()))
      except (RecursionError, ValueError) as error:
        self._lock.close()
        self._lock = None
        raise ConfigError(
          f"{path} is no board of a team: {describe(error)}. Give another file, or remove it."
        ) from error

  def _save(self) -> None:
    if self._path is not None:
      write_atomically(self._path, json.dumps(self.board.to_json(), indent=1) + "\n")

  def _start_ready(self) -> None:
    busy = collections.Counter(agent for agent, _ in self._running.values())
    for task in [] if self._closing else self.board.ready():
      if busy[task.agent] >= self.board.roster.places(task.agent):
        continue
      busy[task.agent] += 1
      self.board.start(task, now=self._clock())
      self._save()  # before it can have any effect
      prompt = self.board.prompt_of(task)
      work = asyncio.create_task(self._work(task, prompt), name=task.id)
      self._running[task.id] = (task.agent, work)

  async def _work(self, task: TeamTask, prompt: str) -> None:
    outcome: tuple[TaskStatus, str] | None = None
    try:
      if not task.ended:  # cancelled before its first step
        outcome = await self._attempt(task, prompt)
    except asyncio.CancelledError:
      if not task.ended:  # not cancelled by its admin: the scheduler closes, and another goes on
        raise
    finally:
      del self._running[task.id]
    try:
      if outcome is not None:
        self.board.finish(task, *outcome, now=self._clock())
      await self._note_change()
    except Exception as error:  # the file cannot be written: whoever waits must not wait for ever
      _log.exception("the team's board cannot be kept")
      self._failure = error
      async with self._changed:
        self._changed.notify_all()

  async def _attempt(self, task: TeamTask, prompt: str) -> tuple[TaskStatus, str]:
    limit = self.board.parents[task.parent].timeout
    try:
      async with asyncio.timeout(limit) as timer:
        return "done", await self._run(task, prompt)
    except TimeoutError as error:
      if timer.expired():
        return "timeout", f"not done within {limit:g} s"
      return "error", describe(error)
    except Exception as error:
      _log.warning("task %s failed", task.id, exc_info=error)
      return "error", describe(error)

  async def _note_change(self) -> None:
    self._save()
    self._start_ready()
    async with self._changed:
      self._changed.notify_all()
