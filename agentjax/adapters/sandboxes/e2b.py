"""Sandboxes of E2B (e2b.dev), by its Python SDK. Needs the extra [e2b] and E2B_API_KEY."""

from __future__ import annotations

import dataclasses
from typing import Any

from agentjax.adapters.sandboxes.rented import (
  Provider,
  RentedConfig,
  RentedSandbox,
  failing_as,
  first_bytes,
  load_sdk,
  pairs,
)
from agentjax.sandbox.interface import Sandbox


@dataclasses.dataclass(unsafe_hash=True)
class E2bConfig(RentedConfig):
  """Settings of the E2B back end; see RentedConfig.

  Attributes:
    template: name or id of the template that sandboxes start from; None is E2B's own.
    user: who programs run as; None is the template's.
  """

  template: str | None = None
  user: str | None = None

  def build(self) -> Sandbox:
    return RentedSandbox("e2b", E2bProvider(self), self)


class E2bProvider(Provider[Any]):
  """Handles are ``e2b.AsyncSandbox``.

  Raises:
    SandboxError: the SDK is not installed.
  """

  def __init__(self, config: E2bConfig):
    self._config = config
    self._sdk = load_sdk("e2b", "e2b")

  async def create(self) -> Any:
    config = self._config
    with failing_as("e2b"):
      return await self._sdk.AsyncSandbox.create(
        template=config.template,
        timeout=int(config.lifetime_seconds),
        metadata=pairs(config.metadata),
        envs=pairs(config.env),
        allow_internet_access=config.network,
        request_timeout=config.create_seconds,
      )

  async def exec(self, handle: Any, command: str, seconds: float) -> None:
    with failing_as("e2b"):
      try:
        await handle.commands.run(
          command, user=self._config.user, timeout=seconds, retain_output=False
        )
      except self._sdk.CommandExitException:
        pass  # it ran

  async def upload(self, handle: Any, path: str, content: bytes) -> None:
    with failing_as("e2b"):
      await handle.files.write(path, content, user=self._config.user)

  async def download(self, handle: Any, path: str, most_bytes: int) -> bytes | None:
    with failing_as("e2b"):
      try:
        stream = await handle.files.read(path, format="stream", user=self._config.user)
      except self._sdk.NotFoundException:
        return None
      async with stream:
        return await first_bytes(stream, most_bytes)

  async def close(self, handle: Any) -> None:
    with failing_as("e2b"):
      await handle.kill()
