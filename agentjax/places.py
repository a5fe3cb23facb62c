"""Places shared fairly, and clocks that stop while their work waits for one.

Boxes, browsers and verdicts run a few at a time. ``Places`` hands these places out so that no
episode keeps others from theirs, and ``Clock`` measures work so that waiting for others costs
nobody any of its time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncIterator, Hashable, Iterator

_owner: contextvars.ContextVar[Hashable | None] = contextvars.ContextVar("owner", default=None)
_clocks: contextvars.ContextVar[tuple[Clock, ...]] = contextvars.ContextVar("clocks", default=())


class QueueTimeout(Exception):
  """No place came free in time."""


class Clock:
  """Seconds of one piece of work, without those in which it waited for a place that others hold.

  It runs from its making. Within ``with clock:`` all places that are waited for stop it, in tasks
  and threads started there too. Work that waits in one part and runs in another is at rest.
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
  """Waits for ``task`` until ``clock`` shows ``seconds``; whether it is done. It goes on.

  Unless there are no ``seconds`` at all, it has a turn first: a loop that was held up since the
  clock began leaves no time to work that never started.
  """
  if seconds > 0:
    await asyncio.sleep(0)
  while not task.done() and (left := seconds - clock.elapsed) > 0:
    await asyncio.wait({task}, timeout=max(left, 0.01))
  return task.done()


@contextlib.contextmanager
def owned_by(owner: Hashable) -> Iterator[None]:
  """Within it, and in tasks and threads started within it, places are taken for ``owner``."""
  token = _owner.set(owner)
  try:
    yield
  finally:
    _owner.reset(token)


@dataclasses.dataclass(eq=False)
class _Waiter:
  ticket: int
  owner: Hashable
  exclusive: bool
  loop: asyncio.AbstractEventLoop
  granted: asyncio.Future[None]
  clocks: tuple[Clock, ...]
  held_up: Clock = dataclasses.field(default_factory=Clock)  # runs while others hold all it needs
  stopped: bool = False  # ``clocks`` are

  def wait_for(self, others: bool) -> None:
    """Notes whether it waits for others, or for its own owner, or no more."""
    if others == self.stopped:
      return
    self.stopped = others
    for clock in self.clocks:
      clock.stop() if others else clock.go()
    self.held_up.go() if others else self.held_up.stop()


class Places:
  """At most ``count`` holders at once; the next place goes to whoever holds the fewest.

  Of equals, whoever has waited longest is first. One owner (see ``owned_by``) holds half of the
  places at most, rounded up; work without an owner counts for itself. May be used from many threads
  and event loops.

  While work waits for others its clocks stand still. While its own owner holds a place here it
  waits for itself, and they run.

  Args:
    count: places.
    seconds: longest wait for others; None waits as long as it takes.
    setting: what to raise where no place comes free, for the message.
  """

  def __init__(self, count: int, seconds: float | None = None, setting: str = "concurrency"):
    self._count, self._seconds, self._setting = count, seconds, setting
    self._share = (count + 1) // 2
    self._lock = threading.Lock()
    self._tickets = itertools.count()
    self._waiters: list[_Waiter] = []
    self._held: collections.Counter[Hashable] = collections.Counter()
    self._taken = 0

  @contextlib.asynccontextmanager
  async def one(self, *, exclusive: bool = False) -> AsyncIterator[None]:
    """Holds a place; all of them where ``exclusive``.

    Raises:
      QueueTimeout: none came free in time.
    """
    waiter = await self._enter(exclusive)
    try:
      yield
    finally:
      self._leave(waiter)

  async def _enter(self, exclusive: bool) -> _Waiter:
    loop, ticket, owner = asyncio.get_running_loop(), next(self._tickets), _owner.get()
    if owner is None:
      owner = (self, ticket)
    waiter = _Waiter(ticket, owner, exclusive, loop, loop.create_future(), _clocks.get())
    waiter.held_up.stop()
    with self._lock:
      self._waiters.append(waiter)
      self._serve()
    try:
      await self._until_granted(waiter)
    except BaseException:
      self._leave(waiter)
      raise
    return waiter

  async def _until_granted(self, waiter: _Waiter) -> None:
    if self._seconds is None:
      await waiter.granted
    elif not await wait_within(waiter.granted, self._seconds, waiter.held_up):
      raise QueueTimeout(
        f"no free place within {self._seconds:g} s; raise {self._setting} ({self._count})"
      )

  def _leave(self, waiter: _Waiter) -> None:
    """Gives back what a waiter holds, or takes it out of the queue."""
    with self._lock:
      if waiter in self._waiters:
        self._waiters.remove(waiter)
        waiter.wait_for(others=False)
      else:
        self._count_out(waiter)
      self._serve()

  def _count_out(self, waiter: _Waiter) -> None:
    self._taken -= self._count if waiter.exclusive else 1
    self._held[waiter.owner] -= 1
    if not self._held[waiter.owner]:
      del self._held[waiter.owner]

  def _serve(self) -> None:
    """Hands out free places; the lock is held."""
    while (waiter := self._next()) is not None:
      self._waiters.remove(waiter)
      waiter.wait_for(others=False)
      self._taken += self._count if waiter.exclusive else 1
      self._held[waiter.owner] += 1
      try:
        waiter.loop.call_soon_threadsafe(_grant, waiter.granted)
      except RuntimeError:  # its event loop has ended, and it with that
        self._count_out(waiter)
    for waiter in self._waiters:
      waiter.wait_for(others=not self._held[waiter.owner])

  def _next(self) -> _Waiter | None:
    """Whose turn it is, if anybody can go now."""
    able = [w for w in self._waiters if self._held[w.owner] < self._share]
    if self._taken >= self._count or not able:
      return None
    first = min(able, key=lambda w: (self._held[w.owner], w.ticket))
    # Where it needs all places the others run out, and nobody begins before it.
    return None if first.exclusive and self._taken else first


def _grant(granted: asyncio.Future[None]) -> None:
  if not granted.done():
    granted.set_result(None)
