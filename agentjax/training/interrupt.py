"""Stopping well: a signal lets an update finish and cancels what only samples."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
  """Context in which SIGINT and SIGTERM set ``requested``; a second one acts as usual.

  Signals reach the main thread only; elsewhere the context does nothing.
  """

  def __init__(self) -> None:
    self.requested = False
    self._task: asyncio.Task[Any] | None = None
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():
      self._previous = {s: signal.signal(s, self._handle) for s in _SIGNALS}
    return self

  def __exit__(self, *exc: object) -> None:
    self._restore()

  async def cancellable(self, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``; a signal cancels it (CancelledError), also one that came just before."""
    self._task = asyncio.ensure_future(work)
    if self.requested:
      self._task.cancel()
    try:
      return await self._task
    finally:
      self._task = None

  def _handle(self, number: int, frame: FrameType | None) -> None:
    self.requested = True
    self._restore()
    if self._task is not None:
      # The loop may be asleep in select; only the thread-safe call wakes it.
      self._task.get_loop().call_soon_threadsafe(self._task.cancel)

  def _restore(self) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}
