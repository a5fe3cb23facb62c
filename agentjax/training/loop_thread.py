"""An event loop in a thread of its own, so that a run works where one is running, as in Jupyter."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
  """Runs coroutines one after the other on one loop, which lasts until ``close``."""

  def __init__(self) -> None:
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="event-loop")
    self._runner = asyncio.Runner()

  def run(self, work: Coroutine[Any, Any, T]) -> T:
    """Waits for ``work``; what it raises, CancelledError included, is raised here."""
    return self._thread.submit(self._runner.run, work).result()

  def close(self) -> None:
    """Cancels what is left on the loop and ends the thread."""
    self._thread.submit(self._runner.close).result()
    self._thread.shutdown()
