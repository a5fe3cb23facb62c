"""Shared by back ends that run programs through a tool of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from agentjax.adapters.sandboxes.base import StartedSandbox
from agentjax.places import Places, QueueTimeout
from agentjax.sandbox.box import ExclusiveBox
from agentjax.sandbox.config import LocalSandboxConfig
from agentjax.sandbox.interface import (
  Program,
  SandboxLimits,
  SandboxResult,
)
from agentjax.sandbox.result import infra_error

SNAPSHOT_BYTES = 256 * 2**20


C = TypeVar("C", bound=LocalSandboxConfig)


class LocalSandbox(StartedSandbox, Generic[C]):
  """Base of these back ends, whose runs wait for a place."""

  def __init__(self, config: C):
    super().__init__()
    self.config = config
    self.config.validate("sandbox")
    self.places = Places(config.concurrency, config.queue_seconds)


class LocalBox(ExclusiveBox):
  """Base of their boxes, whose runs wait for a place.

  A back end defines ``_put_all`` and ``_run`` besides what ExclusiveBox asks for.
  """

  def __init__(self, back_end: str, places: Places, limits: SandboxLimits):
    super().__init__(back_end)
    self._places, self._limits = places, limits

  async def exec(
    self,
    program: Program,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits | None = None,
  ) -> SandboxResult:
    limits = limits or self._limits
    self._check(program, limits)
    async with self.turn():
      try:
        async with self._places.one():
          if files:
            await self._put_all(files)
          return await self._run(program, stdin, limits)
      except QueueTimeout as error:
        return infra_error(str(error), "queue")

  def _check(self, program: Program, limits: SandboxLimits) -> None:
    """Raises SandboxError for what cannot be run here."""

  async def _put(self, path: str, content: bytes) -> None:
    await self._put_all({path: content})

  async def _put_all(self, files: Mapping[str, bytes]) -> None:
    raise NotImplementedError(f"{type(self).__name__} must define _put_all()")

  async def _run(self, program: Program, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
    raise NotImplementedError(f"{type(self).__name__} must define _run()")
