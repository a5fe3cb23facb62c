"""Modules that stand for the SDKs of E2B and Daytona: the same names, faults on demand.

A sandbox is a folder of this machine, whose programs run without any wall, so tests give them
harmless ones only. Calls are written down with their arguments, to be held against the real SDKs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import tempfile
import types
from collections.abc import AsyncIterator
from typing import Any

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass
class Machine:
  """What both stand on: a folder in place of /tmp.

  Attributes:
    faults: raised by the next calls, one each; None lets one pass.
    calls: (name, positional, keyword) of all so far.
  """

  faults: list[Exception | None]
  calls: list[Call]
  environment: dict[str, str]

  def __post_init__(self) -> None:
    self.folder = tempfile.mkdtemp(prefix="agentjax-rented-")
    self.alive = True

  def called(self, name: str, *arguments: Any, **keywords: Any) -> None:
    self.calls.append((name, arguments, keywords))
    if self.faults and (fault := self.faults.pop(0)) is not None:
      raise fault

  def inside(self, text: str) -> str:
    assert self.alive
    return text.replace("/tmp/", f"{self.folder}/")

  def write(self, path: str, content: bytes) -> None:
    if path.endswith(".sh"):  # a script names places as a command does
      content = self.inside(content.decode()).encode()
    pathlib.Path(self.inside(path)).write_bytes(content)

  async def run(self, command: str) -> int:
    process = await asyncio.create_subprocess_exec(
      *("sh", "-c", self.inside(command)),
      env={"PATH": os.environ["PATH"], **self.environment},
      start_new_session=True,
    )
    try:
      return await process.wait()
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      await process.wait()

  def end(self) -> None:
    self.alive = False
    shutil.rmtree(self.folder, ignore_errors=True)


async def _parts(path: str) -> AsyncIterator[bytes]:
  with open(path, "rb") as file:
    while part := file.read(1 << 10):
      yield part


# -- E2B


class CommandExitException(Exception):
  pass


class NotFoundException(Exception):
  pass


class _Stream:
  def __init__(self, path: str):
    self._parts = _parts(path)

  def __aiter__(self) -> AsyncIterator[bytes]:
    return self._parts

  async def __aenter__(self) -> _Stream:
    return self

  async def __aexit__(self, *error: Any) -> None:
    await self._parts.aclose()  # type: ignore[attr-defined]


class _E2bCommands:
  def __init__(self, machine: Machine):
    self._machine = machine

  async def run(self, cmd: str, **keywords: Any) -> None:
    self._machine.called("commands.run", cmd, **keywords)
    if code := await self._machine.run(cmd):
      raise CommandExitException(f"Command exited with code {code}")


class _E2bFiles:
  def __init__(self, machine: Machine):
    self._machine = machine

  async def write(self, path: str, data: bytes, **keywords: Any) -> None:
    self._machine.called("files.write", path, data, **keywords)
    self._machine.write(path, data)

  async def read(self, path: str, **keywords: Any) -> _Stream:
    self._machine.called("files.read", path, **keywords)
    if not os.path.exists(self._machine.inside(path)):
      raise NotFoundException(path)
    return _Stream(self._machine.inside(path))


def e2b(faults: list[Exception | None], calls: list[Call]) -> types.ModuleType:
  class AsyncSandbox:
    def __init__(self, machine: Machine):
      self._machine = machine
      self.commands, self.files = _E2bCommands(machine), _E2bFiles(machine)

    @classmethod
    async def create(cls, **keywords: Any) -> AsyncSandbox:
      machine = Machine(faults, calls, keywords["envs"])
      machine.called("create", **keywords)
      return cls(machine)

    async def kill(self) -> bool:
      self._machine.called("kill")
      alive = self._machine.alive
      self._machine.end()
      return alive

  module = types.ModuleType("e2b")
  vars(module).update(
    AsyncSandbox=AsyncSandbox,
    CommandExitException=CommandExitException,
    NotFoundException=NotFoundException,
  )
  return module


# -- Daytona


class DaytonaNotFoundError(Exception):
  pass


class _DaytonaProcess:
  def __init__(self, machine: Machine):
    self._machine = machine

  async def exec(self, command: str, **keywords: Any) -> Any:
    self._machine.called("process.exec", command, **keywords)
    return types.SimpleNamespace(exit_code=await self._machine.run(command), result="")


class _DaytonaFiles:
  def __init__(self, machine: Machine):
    self._machine = machine

  async def upload_file(self, file: bytes, remote_path: str) -> None:
    self._machine.called("fs.upload_file", file, remote_path)
    self._machine.write(remote_path, file)

  async def download_file_stream(self, remote_path: str) -> AsyncIterator[bytes]:
    self._machine.called("fs.download_file_stream", remote_path)

    async def stream() -> AsyncIterator[bytes]:  # it fails when it is read, as the real one
      if not os.path.exists(self._machine.inside(remote_path)):
        raise DaytonaNotFoundError(remote_path)
      if not os.path.getsize(self._machine.inside(remote_path)):
        raise RuntimeError(f"No file data received for: {remote_path}")  # as the real one
      async for part in _parts(self._machine.inside(remote_path)):
        yield part

    return stream()


class _DaytonaSandbox:
  def __init__(self, machine: Machine):
    self._machine = machine
    self.process, self.fs = _DaytonaProcess(machine), _DaytonaFiles(machine)

  async def delete(self) -> None:
    self._machine.called("delete")
    if not self._machine.alive:
      raise DaytonaNotFoundError
    self._machine.end()


def daytona(faults: list[Exception | None], calls: list[Call]) -> types.ModuleType:
  class AsyncDaytona:
    async def create(self, params: Any, **keywords: Any) -> _DaytonaSandbox:
      machine = Machine(faults, calls, params.env_vars)
      machine.called("create", params, **keywords)
      return _DaytonaSandbox(machine)

    async def close(self) -> None:
      calls.append(("client.close", (), {}))

  module = types.ModuleType("daytona")
  vars(module).update(
    AsyncDaytona=AsyncDaytona,
    CreateSandboxFromImageParams=types.SimpleNamespace,
    Resources=types.SimpleNamespace,
    DaytonaNotFoundError=DaytonaNotFoundError,
  )
  return module
