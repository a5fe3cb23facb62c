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

from agentjax.training import processes

T = TypeVar("T")
_STOPS = "stops after what is being computed or compiled now, with all that is finished saved"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
  """Context in which SIGINT and SIGTERM set ``requested``; a second one acts as usual.

  Python handles a signal only when the main thread returns from the present call, and compiling may
  take minutes. So another thread reports the signal at once. A second signal that comes before the
  first was handled ends the process: a run may be killed at any instant.

  Signals reach the main thread only; elsewhere the context answers to no signal. Of several
  processes one that gets a signal tells the others at once, and they do as if they had got it.

  Attributes:
    requested: whether a signal came, here or to another process.
    tell: prints a line; called from another thread.
  """

  def __init__(self) -> None:
    self.requested = False
    self.tell: Callable[[str], None] = lambda text: None
    self._task: asyncio.Task[Any] | None = None
    self._previous: dict[int, Any] = {}
    self._cleanup = contextlib.ExitStack()

  def __enter__(self) -> Interrupt:
    self._call = processes.Call(self._other_asks)
    self._cleanup.callback(self._call.close)
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
          self._call.call()
          self.tell(f"{signal.Signals(number).name}: {_STOPS}; a second signal stops at once")
        elif not self.requested:  # the first is not even handled yet
          os._exit(128 + number)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    self._restore()
    self._stop()

  def _other_asks(self) -> None:
    self.tell(f"a signal to another process: {_STOPS}")
    self._stop()

  def _stop(self) -> None:
    self.requested = True
    if (task := self._task) is not None:
      # The loop may be asleep in select; only the thread-safe call wakes it.
      task.get_loop().call_soon_threadsafe(task.cancel)

  def _restore(self) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}
