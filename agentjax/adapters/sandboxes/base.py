"""Shared by the back ends of this folder: started once; boxes are closed with the back end."""

from __future__ import annotations

import asyncio
from typing import Any

from agentjax.sandbox.interface import Capabilities, Protection


class StartedSandbox:
  """Base of back ends; see the Sandbox protocol. Serves one event loop after another.

  A back end defines ``_start``, which tries it out and sets ``protections``.
  """

  capabilities = Capabilities(files=True, snapshot=True, commands=True)

  def __init__(self) -> None:
    self.protections: frozenset[Protection] = frozenset()
    self.boxes: set[Any] = set()
    self._started = False
    self._starting: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

  async def start(self) -> frozenset[Protection]:
    loop = asyncio.get_running_loop()
    if self._starting is None or self._starting[0] is not loop:
      self._starting = (loop, asyncio.Lock())
    async with self._starting[1]:
      if not self._started:
        await self._start()
        self._started = True
    return self.protections

  async def close(self) -> None:
    for box in list(self.boxes):
      await box.close()

  async def _start(self) -> None:
    raise NotImplementedError(f"{type(self).__name__} must define _start()")
