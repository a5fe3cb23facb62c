"""Shared by the boxes of all back ends: one operation at a time, and none once closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from agentjax.sandbox.interface import SandboxError, SandboxLimits, Session


class ExclusiveBox:
  """Base of boxes; see the Box protocol.

  A back end defines ``_put``, which writes one file, ``_interrupt``, which ends what runs now, and
  ``_wipe``, which removes the files once nothing runs.

  Args:
    back_end: its name, for messages.
  """

  def __init__(self, back_end: str):
    self._back_end = back_end
    self.busy = asyncio.Lock()
    self._closed = False

  async def session(self, *, limits: SandboxLimits | None = None) -> Session:
    """Refused: most back ends have no sessions."""
    raise SandboxError(
      f"the {self._back_end} back end has no sessions (Capabilities.sessions); use 'embedded' in "
      "config.sandboxes, or cells that need nothing of earlier ones"
    )

  async def upload(self, path: str, content: bytes) -> None:
    """Writes one file below the work directory; never through a link."""
    async with self.turn():
      await self._put(path, content)

  async def close(self) -> None:
    """Ends what runs and wipes the work directory; closing twice is harmless."""
    if self._closed:
      return
    self._closed = True
    await self._interrupt()
    async with self.busy:
      await self._wipe()

  @contextlib.asynccontextmanager
  async def turn(self) -> AsyncIterator[None]:
    """Exclusive use of the box. Raises SandboxError once it is closed."""
    async with self.busy:
      self._check_open()
      yield

  def _check_open(self) -> None:
    if self._closed:
      raise SandboxError("this box is closed; open another with Sandbox.create()")

  async def _put(self, path: str, content: bytes) -> None:
    raise NotImplementedError(f"{type(self).__name__} must define _put()")

  async def _interrupt(self) -> None:
    raise NotImplementedError(f"{type(self).__name__} must define _interrupt()")

  async def _wipe(self) -> None:
    raise NotImplementedError(f"{type(self).__name__} must define _wipe()")
