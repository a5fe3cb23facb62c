"""What back ends share that run programs through a tool of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Generic, TypeVar

from agentjax.adapters.sandboxes.base import StartedSandbox
from agentjax.config import PositiveFloat, PositiveInt, check
from agentjax.places import Places, QueueTimeout
from agentjax.sandbox.box import ExclusiveBox
from agentjax.sandbox.config import SandboxConfig
from agentjax.sandbox.interface import (
  Program,
  Protection,
  SandboxLimits,
  SandboxResult,
)
from agentjax.sandbox.result import infra_error

SNAPSHOT_BYTES = 256 * 2**20


@dataclasses.dataclass(unsafe_hash=True)
class LocalConfig(SandboxConfig):
  """Settings that these back ends share; the figures are ours.

  Attributes:
    limits: bounds of a run unless the caller gives its own.
    concurrency: runs at once; further ones wait their turn, and their clock starts with the turn.
    queue_seconds: longest wait for a turn; then the run ends as INFRA_ERROR, never as TIMEOUT. The
      wait is no part of a call's or a verdict's time (``places.Clock``).
    require: protections without which the sandbox refuses to start.
    allow_unisolated: start even where some of ``require`` are missing, and only warn.
  """

  concurrency: PositiveInt = 4
  queue_seconds: PositiveFloat = 600.0
  require: tuple[str, ...] = ("limits", "descendants", "network", "processes", "filesystem")
  allow_unisolated: bool = False

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    known = [p.value for p in Protection]
    for name in self.require:
      check(name in known, f"{path}.require", self.require, ", ".join(known))


C = TypeVar("C", bound=LocalConfig)


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
    async with self._turn():
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
