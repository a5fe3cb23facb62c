"""One event loop for work that comes from many threads and loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
  """An event loop in a thread of its own, begun with the first work for it."""

  def __init__(self, name: str):
    self._name = name
    self._loop: asyncio.AbstractEventLoop | None = None
    self._starting = threading.Lock()

  @property
  def alive(self) -> bool:
    return self._loop is not None

  async def run(self, work: Coroutine[Any, Any, T]) -> T:
    """``await work`` in the thread; cancelling the caller cancels it there."""
    with self._starting:
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
      future = asyncio.run_coroutine_threadsafe(work, self._loop)
    return await asyncio.wrap_future(future)

  def close(self) -> None:
    with self._starting:
      if self._loop is not None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None
