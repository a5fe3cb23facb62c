"""Places shared fairly, and clocks that stop while their work waits for one.

Only a few boxes, browsers and verdicts run at a time. ``Places`` gives out these places fairly
among episodes. ``Clock`` measures work without the time spent waiting for others.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import heapq
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

_owner: contextvars.ContextVar[Hashable | None] = contextvars.ContextVar("owner", default=None)
_clocks: contextvars.ContextVar[tuple[Clock, ...]] = contextvars.ContextVar("clocks", default=())


class QueueTimeout(Exception):
  """No place came free in time."""


class TooSlow(Exception):
  """A call did not end in time."""


class Clock:
  """Seconds of one piece of work, without the wait for places that others hold.

  It starts when it is made. Within ``with clock:``, and in tasks and threads started there, waiting
  for a place stops it. While one part of the work waits, the clock stands still even if another
  part runs.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._start = time.monotonic()
    self._waiting = 0
    self._since = 0.0
    self._waited = 0.0

  @property
  def elapsed(self) -> float:
    """Seconds so far."""
    with self._lock:
      now = self._since if self._waiting else time.monotonic()
      return now - self._start - self._waited

  def stop(self) -> None:
    """A part of the work begins to wait."""
    with self._lock:
      if not self._waiting:
        self._since = time.monotonic()
      self._waiting += 1

  def go(self) -> None:
    """That part waits no longer."""
    with self._lock:
      self._waiting -= 1
      if not self._waiting:
        self._waited += time.monotonic() - self._since

  def __enter__(self) -> Clock:
    _clocks.set((*_clocks.get(), self))
    return self

  def __exit__(self, *_: object) -> None:
    # No token is kept: parts of the work may be within the same clock at once.
    _clocks.set(_clocks.get()[:-1])


async def wait_within(task: asyncio.Future, seconds: float, clock: Clock) -> bool:
  """Waits for ``task`` until ``clock`` shows ``seconds``; returns whether it is done. The task is
  not cancelled.

  Unless ``seconds`` is 0, the task runs once first: a blocked loop may have used up the time before
  the task could start.
  """
  if seconds > 0:
    await asyncio.sleep(0)
  while not task.done() and (left := seconds - clock.elapsed) > 0:
    await asyncio.wait({task}, timeout=max(left, 0.01))
  return task.done()


async def run_within(
  call: Callable[[], Awaitable[T]], seconds: float, clock: Clock, *, grace: float, name: str
) -> T:
  """``await call()``, which is cancelled once ``clock`` shows ``seconds``.

  Args:
    call: what is awaited; it may ignore its cancellation.
    seconds: see above.
    clock: as in ``wait_within``.
    grace: seconds in which what was cancelled should end; then it is left behind.
    name: of what is called, for the log.

  Raises:
    TooSlow: it did not end in time.
    RuntimeError: it cancelled itself.
  """

  async def run() -> T:
    return await call()

  task = asyncio.ensure_future(run())
  try:
    # Not wait_for: it waits for ever if a coroutine ignores its cancellation.
    done = await wait_within(task, seconds, clock)
  except asyncio.CancelledError:
    await _abandon(task, grace, name)
    raise
  if not done:
    await _abandon(task, grace, name)
    raise TooSlow(f"took longer than {seconds:g} s")
  if task.cancelled():
    raise RuntimeError("it cancelled itself")
  return task.result()


_left_behind: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks by weak references only


async def _abandon(task: asyncio.Task[Any], grace: float, name: str) -> None:
  _left_behind.add(task)
  task.add_done_callback(_forget)
  task.cancel()
  await asyncio.wait({task}, timeout=grace)
  if not task.done():
    _log.warning("%s ignored its cancellation for %g s and is left behind", name, grace)


def _forget(task: asyncio.Task[Any]) -> None:
  _left_behind.discard(task)
  if not task.cancelled():
    task.exception()  # read, so that asyncio does not report it as lost


@contextlib.contextmanager
def owned_by(owner: Hashable) -> Iterator[None]:
  """Within it, and in tasks and threads started within it, places are taken for ``owner``."""
  token = _owner.set(owner)
  try:
    yield
  finally:
    _owner.reset(token)


class _Waiter:
  """Holds a place while its block runs, or waits for one."""

  def __init__(self, places: Places, exclusive: bool):
    owner = _owner.get()
    self.owner: Hashable = object() if owner is None else owner
    self.exclusive = exclusive
    self.loop = asyncio.get_running_loop()
    self.granted: asyncio.Future[None] = self.loop.create_future()
    self.clocks = _clocks.get()
    self.held_up = Clock()  # runs while others hold all it needs
    self.held_up.stop()
    self.stopped = False  # ``clocks`` are
    self.ticket = 0
    self.waiting = False  # in the queue of its owner
    self._places = places

  async def __aenter__(self) -> None:
    await self._places.enter(self)

  async def __aexit__(self, *_: object) -> None:
    self._places.leave(self)

  def grant(self) -> None:
    """Lets it go on, whoever left the place; raises RuntimeError where its event loop has ended."""
    try:
      here = asyncio.get_running_loop()
    except RuntimeError:  # a block that outlives its event loop is left outside of any
      here = None
    if self.loop is here:
      self._go_on()
    else:
      self.loop.call_soon_threadsafe(self._go_on)

  def _go_on(self) -> None:
    if not self.granted.done():
      self.granted.set_result(None)

  def wait_for(self, others: bool) -> None:
    """Notes whether it waits for others, for its own owner, or not at all."""
    if others == self.stopped:
      return
    self.stopped = others
    for clock in self.clocks:
      clock.stop() if others else clock.go()
    self.held_up.go() if others else self.held_up.stop()


class Places:
  """At most ``count`` holders at once; the next place goes to whoever holds the fewest.

  Among equals, the longest wait is first. One owner (see ``owned_by``) holds at most half of the
  places, rounded up; work without an owner is its own owner. May be used from many threads and
  event loops.

  While work waits for others its clocks stand still. While its own owner holds a place here, they
  run.

  Args:
    count: places.
    seconds: longest wait for others; None waits as long as it takes.
    setting: name of the setting to raise if no place comes free, for the message.
  """

  def __init__(self, count: int, seconds: float | None = None, setting: str = "concurrency"):
    self._count, self._seconds, self._setting = count, seconds, setting
    self._share = (count + 1) // 2
    self._lock = threading.Lock()
    self._queues: dict[Hashable, collections.deque[_Waiter]] = {}
    self._tickets = self._waiting = self._taken = 0
    self._held: collections.Counter[Hashable] = collections.Counter()
    # Heads of queues by (places their owner holds, ticket); those that changed since are passed by.
    self._heads: list[tuple[int, int, _Waiter]] = []

  def one(self, *, exclusive: bool = False) -> contextlib.AbstractAsyncContextManager[None]:
    """Holds a place; all of them where ``exclusive``.

    Raises:
      QueueTimeout: none came free in time.
    """
    return _Waiter(self, exclusive)

  async def enter(self, waiter: _Waiter) -> None:
    """Waits until a waiter has what it needs; raises as ``one``."""
    with self._lock:
      self._enqueue(waiter)
      self._serve()
      if not waiter.waiting:
        return
      waiter.wait_for(others=not self._held[waiter.owner])
    try:
      await self._until_granted(waiter)
    except BaseException:
      self.leave(waiter)
      raise

  async def _until_granted(self, waiter: _Waiter) -> None:
    if self._seconds is None:
      await waiter.granted
    elif not await wait_within(waiter.granted, self._seconds, waiter.held_up):
      raise QueueTimeout(
        f"no free place within {self._seconds:g} s; raise {self._setting} ({self._count})"
      )

  def leave(self, waiter: _Waiter) -> None:
    """Frees the places of a waiter, or removes it from the queue."""
    with self._lock:
      if waiter.waiting:
        self._dequeue(waiter)
        self._rank(waiter.owner)
      else:
        self._count_places(waiter, -1)
      self._serve()

  def _enqueue(self, waiter: _Waiter) -> None:
    self._tickets += 1
    waiter.ticket, waiter.waiting = self._tickets, True
    self._waiting += 1
    self._queues.setdefault(waiter.owner, collections.deque()).append(waiter)
    self._rank(waiter.owner)

  def _dequeue(self, waiter: _Waiter) -> None:
    waiter.waiting = False
    self._waiting -= 1
    queue = self._queues[waiter.owner]
    queue.remove(waiter)
    if not queue:
      del self._queues[waiter.owner]
    waiter.wait_for(others=False)

  def _count_places(self, waiter: _Waiter, sign: int) -> None:
    """Places of ``waiter`` are taken (1) or free (-1)."""
    owner = waiter.owner
    self._taken += sign * (self._count if waiter.exclusive else 1)
    before = self._held[owner]
    self._held[owner] = before + sign
    if not self._held[owner]:
      del self._held[owner]
    if not before or not self._held[owner]:
      for other in self._queues.get(owner, ()):
        other.wait_for(others=not self._held[owner])
    self._rank(owner)

  def _rank(self, owner: Hashable) -> None:
    """The head of an owner's queue, or what the owner holds, may have changed."""
    if len(self._heads) > 2 * self._waiting + 64:  # most are of the past
      self._heads = [self._head(queue[0]) for queue in self._queues.values()]
      heapq.heapify(self._heads)
    elif owner in self._queues:
      heapq.heappush(self._heads, self._head(self._queues[owner][0]))

  def _head(self, waiter: _Waiter) -> tuple[int, int, _Waiter]:
    return self._held[waiter.owner], waiter.ticket, waiter

  def _serve(self) -> None:
    """Hands out free places; the lock is held."""
    while (waiter := self._next()) is not None:
      self._dequeue(waiter)
      self._count_places(waiter, 1)
      try:
        waiter.grant()
      except RuntimeError:  # its event loop has ended, and it with that
        self._count_places(waiter, -1)

  def _next(self) -> _Waiter | None:
    """The next waiter, if one can go now."""
    while self._heads and self._taken < self._count:
      held, _, first = self._heads[0]
      if not first.waiting or held != self._held[first.owner]:
        heapq.heappop(self._heads)
      elif held >= self._share or (first.exclusive and self._taken):
        return None  # if it needs all places, the others finish and nobody begins before it
      else:
        return first
    return None
