"""An event loop in a thread of its own, so that a run works where one is running, as in Jupyter."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
  """A loop that runs until ``close``: what a coroutine leaves behind on it goes on."""

  def __init__(self) -> None:
    self._stop = asyncio.Event()
    started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
    self._thread = threading.Thread(
      target=lambda: asyncio.run(self._serve(started)), name="event-loop", daemon=True
    )
    self._thread.start()
    self._loop = started.result()

  def run(self, work: Coroutine[Any, Any, T]) -> T:
    """Waits for ``work``; what it raises, CancelledError included, is raised here."""
    try:
      return asyncio.run_coroutine_threadsafe(work, self._loop).result()
    except concurrent.futures.CancelledError as error:
      raise asyncio.CancelledError from error

  def close(self) -> None:
    """Cancels what is left on the loop and ends the thread."""
    if self._thread.is_alive():
      self._loop.call_soon_threadsafe(self._stop.set)
      self._thread.join()

  async def _serve(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    started.set_result(asyncio.get_running_loop())
    await self._stop.wait()
