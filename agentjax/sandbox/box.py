"""What the boxes of all back ends share: one thing at a time, and nothing once closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from agentjax.sandbox.interface import (
  RunStatus,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  Session,
)
from agentjax.sandbox.result import no_sessions


class ExclusiveBox:
  """Base of boxes; see the Box protocol.

  Args:
    back_end: its name, for messages.
  """

  def __init__(self, back_end: str):
    self._back_end = back_end
    self._busy = asyncio.Lock()
    self._closed = False

  async def session(self, *, limits: SandboxLimits | None = None) -> Session:
    """Refused: most back ends have no sessions."""
    raise no_sessions(self._back_end)

  async def upload(self, path: str, content: bytes) -> None:
    """Writes one file below the work directory; never through a link."""
    async with self._turn():
      await self._put(path, content)

  @contextlib.asynccontextmanager
  async def _turn(self) -> AsyncIterator[None]:
    """Nothing else happens in the box meanwhile. Raises SandboxError once it is closed."""
    async with self._busy:
      self._check_open()
      yield

  def _check_open(self) -> None:
    if self._closed:
      raise SandboxError("this box is closed; open another with Sandbox.create()")

  async def _put(self, path: str, content: bytes) -> None:
    raise NotImplementedError(f"{type(self).__name__} must define _put()")


class CalledBox(ExclusiveBox):
  """A box whose programs run in a service, in a call that closing the box cancels."""

  def __init__(self, back_end: str):
    super().__init__(back_end)
    self._running: asyncio.Future[SandboxResult] | None = None

  async def _await_call(self, call: Coroutine[Any, Any, SandboxResult]) -> SandboxResult:
    """What the call gives; KILLED where the box is closed meanwhile."""
    self._running = asyncio.ensure_future(call)
    try:
      return await self._running
    except asyncio.CancelledError:
      task = asyncio.current_task()
      if not self._closed or (task is not None and task.cancelling()):
        raise
      return SandboxResult(RunStatus.KILLED, "", "", None, 0.0, "the box was closed")
    finally:
      self._running.cancel()
      self._running = None

  def _cancel_call(self) -> None:
    if self._running is not None:
      self._running.cancel()
