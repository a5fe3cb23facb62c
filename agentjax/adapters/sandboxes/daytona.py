"""Sandboxes of Daytona (daytona.io), by its Python SDK. Needs [daytona] and DAYTONA_API_KEY."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple

from agentjax.adapters.sandboxes.rented import (
  Provider,
  RentedConfig,
  RentedSandbox,
  failing_as,
  first_bytes,
  load_sdk,
  pairs,
)
from agentjax.config import NonNegativeInt, PositiveInt, check
from agentjax.sandbox.interface import Sandbox


@dataclasses.dataclass(unsafe_hash=True)
class DaytonaConfig(RentedConfig):
  """Settings of the Daytona back end; see RentedConfig. The figures are ours.

  Attributes:
    image: container image that sandboxes start from.
    cpu: cores.
    memory_gib, disk_gib, gpu: of the sandbox.
    os_user: who programs run as; None is the image's choice.
  """

  image: str = "python:3.11-slim"
  cpu: PositiveInt = 1
  memory_gib: PositiveInt = 1
  disk_gib: PositiveInt = 1
  gpu: NonNegativeInt = 0
  os_user: str | None = None

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.image != "", f"{path}.image", self.image, "the name of an image")

  def build(self) -> Sandbox:
    return RentedSandbox("daytona", DaytonaProvider(self), self)


class _Rented(NamedTuple):
  client: Any  # of its own: a client belongs to one event loop
  sandbox: Any


class DaytonaProvider(Provider[_Rented]):
  """Handles hold a ``daytona.AsyncDaytona`` and its sandbox.

  Raises:
    SandboxError: the SDK is not installed.
  """

  def __init__(self, config: DaytonaConfig):
    self._config = config
    self._sdk = load_sdk("daytona", "daytona")

  async def create(self) -> _Rented:
    config, sdk = self._config, self._sdk
    with failing_as("daytona"):
      client = sdk.AsyncDaytona()
      try:
        sandbox = await client.create(
          sdk.CreateSandboxFromImageParams(
            image=config.image,
            resources=sdk.Resources(
              cpu=config.cpu,
              memory=config.memory_gib,
              disk=config.disk_gib,
              gpu=config.gpu or None,
            ),
            env_vars=pairs(config.env),
            labels=pairs(config.metadata),
            os_user=config.os_user,
            network_block_all=not config.network,
            ephemeral=True,
            ttl_minutes=math.ceil(config.lifetime_seconds / 60),
          ),
          timeout=config.create_seconds,
        )
      except BaseException:
        await client.close()
        raise
      return _Rented(client, sandbox)

  async def exec(self, handle: _Rented, command: str, seconds: float) -> None:
    with failing_as("daytona"):
      await handle.sandbox.process.exec(command, timeout=math.ceil(seconds))

  async def upload(self, handle: _Rented, path: str, content: bytes) -> None:
    with failing_as("daytona"):
      await handle.sandbox.fs.upload_file(content, path)

  async def download(self, handle: _Rented, path: str, most_bytes: int) -> bytes | None:
    with failing_as("daytona"):
      try:
        async with contextlib.aclosing(await handle.sandbox.fs.download_file_stream(path)) as parts:
          return await first_bytes(parts, most_bytes)
      except self._sdk.DaytonaNotFoundError:
        return None

  async def close(self, handle: _Rented) -> None:
    with failing_as("daytona"):
      try:
        await handle.sandbox.delete()
      except self._sdk.DaytonaNotFoundError:
        pass  # it has ended
      finally:
        await handle.client.close()
