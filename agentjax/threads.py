"""Bridges between threads and event loops: a loop in its own thread, a call in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
  """An event loop in its own thread, started with the first work for it.

  It serves many threads and loops at once. It also works if a loop is running already, as in
  Jupyter. Tasks that a coroutine leaves on the loop run until ``close``.
  """

  def __init__(self, name: str = "event-loop"):
    self._name = name
    self._lock = threading.Lock()
    self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread] | None = None

  @property
  def alive(self) -> bool:
    """Whether the loop runs."""
    return self._running is not None

  def run(self, work: Coroutine[Any, Any, T]) -> T:
    """Blocks until ``work`` is done; its exceptions, CancelledError included, are raised here."""
    try:
      return self._submit(work).result()
    except concurrent.futures.CancelledError as error:
      raise asyncio.CancelledError from error

  async def wait(self, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` in the thread; cancelling the caller cancels it there."""
    return await asyncio.wrap_future(self._submit(work))

  def close(self) -> None:
    """Cancels what is left on the loop and ends the thread; further work begins another."""
    with self._lock:
      running, self._running = self._running, None
    if running is not None:
      loop, stop, thread = running
      loop.call_soon_threadsafe(stop.set)
      thread.join()

  def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    with self._lock:
      if self._running is None:
        self._running = self._start()
      return asyncio.run_coroutine_threadsafe(work, self._running[0])

  def _start(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Event, threading.Thread]:
    started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
    stop = asyncio.Event()

    async def serve() -> None:
      started.set_result(asyncio.get_running_loop())
      await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name=self._name, daemon=True)
    thread.start()
    return started.result(), stop, thread


async def run_in_loop(loop: asyncio.AbstractEventLoop | None, work: Coroutine[Any, Any, T]) -> T:
  """Awaits ``work`` in ``loop``, which may be the loop of another thread; None is the present
  loop."""
  if loop is None or loop is asyncio.get_running_loop():
    return await work
  return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def call_in_thread(
  function: Callable[[], T], *, name: str, on_late_end: Callable[[], None] = lambda: None
) -> T:
  """``function()`` in a thread of its own, with the caller's context variables.

  The thread is a daemon and not part of a pool: a call that never returns neither blocks others nor
  delays the exit. What the function raises, of any kind, is raised here; StopIteration, which a
  future cannot hold, as RuntimeError.

  Args:
    function: what is called.
    name: of the thread.
    on_late_end: called in the loop if the function ends after the caller was cancelled.
  """
  loop = asyncio.get_running_loop()
  future: asyncio.Future[T] = loop.create_future()
  variables = contextvars.copy_context()

  def deliver(settle: Callable[[], None]) -> None:
    if future.cancelled():
      on_late_end()
    else:
      settle()

  def work() -> None:
    settle: Callable[[], None]
    try:
      result = variables.run(function)
      settle = lambda: future.set_result(result)  # noqa: E731
    except BaseException as raised:
      error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
      settle = lambda: future.set_exception(error)  # noqa: E731
    try:
      loop.call_soon_threadsafe(deliver, settle)
    except RuntimeError:  # the loop closed meanwhile: nobody waits
      pass

  threading.Thread(target=work, name=name, daemon=True).start()
  return await future
