"""Boxes whose programs run in a service, and how such a service fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from agentjax.sandbox.box import ExclusiveBox
from agentjax.sandbox.interface import RunStatus, SandboxError, SandboxResult


class InfraError(SandboxError):
  """The service failed, not the program.

  Attributes:
    again: whether another try may help.
  """

  def __init__(self, message: str, *, again: bool = True):
    super().__init__(message)
    self.again = again


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

  async def _interrupt(self) -> None:
    if self._running is not None:
      self._running.cancel()
