"""Orderly stop: a signal lets an update finish and cancels sampling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
  """Context in which SIGINT and SIGTERM set ``requested``; a second one acts as usual.

  Python handles a signal only when the main thread returns from the present call, and compiling may
  take minutes. So another thread reports the signal at once. A second signal that comes before the
  first was handled ends the process: a run may be killed at any instant.

  Signals reach the main thread only; elsewhere the context does nothing.

  Attributes:
    requested: whether a signal came.
    tell: prints a line; called from another thread.
  """

  def __init__(self) -> None:
    self.requested = False
    self.tell: Callable[[str], None] = lambda text: None
    self._task: asyncio.Task[Any] | None = None
    self._previous: dict[int, Any] = {}
    self._cleanup = contextlib.ExitStack()

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():
      self._previous = {s: signal.signal(s, self._handle) for s in _SIGNALS}
      heard, written = socket.socketpair()
      written.setblocking(False)
      earlier = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
      listener = threading.Thread(target=self._listen, args=(heard,), daemon=True, name="signals")
      listener.start()
      self._cleanup.callback(heard.close)
      self._cleanup.callback(listener.join)
      self._cleanup.callback(written.close)  # which ends the listener
      self._cleanup.callback(signal.set_wakeup_fd, earlier)
    return self

  def __exit__(self, *exc: object) -> None:
    self._restore()
    self._cleanup.close()

  async def cancellable(self, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``; a signal cancels it (CancelledError), also one that came just before."""
    self._task = asyncio.ensure_future(work)
    if self.requested:
      self._task.cancel()
    try:
      return await self._task
    finally:
      self._task = None

  def _listen(self, heard: socket.socket) -> None:
    count = 0
    while numbers := heard.recv(64):
      for number in numbers:
        if number not in _SIGNALS:
          continue
        count += 1
        if count == 1:
          self.tell(
            f"{signal.Signals(number).name}: stops after what is being computed or compiled now, "
            "with all that is finished saved; a second signal stops at once"
          )
        elif not self.requested:  # the first is not even handled yet
          os._exit(128 + number)

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
