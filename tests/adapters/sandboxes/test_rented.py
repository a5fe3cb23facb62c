"""Vendors' sandboxes over SDKs that stand for theirs: what is asked, and who is to blame."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from agentjax.adapters.sandboxes import rented
from agentjax.adapters.sandboxes.called import InfraError
from agentjax.config import ConfigError
from agentjax.sandbox.config import SandboxConfig
from agentjax.sandbox.interface import (
  BoxContentError,
  Command,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
)
from tests.adapters.sandboxes import fake_sdks

KINDS = ["e2b", "daytona"]
RUN = {"e2b": "commands.run", "daytona": "process.exec"}
ENDS = {"e2b": "kill", "daytona": "delete"}
Use = Callable[..., Any]


class Vendor:
  """A back end over a stand-in SDK, with its faults and calls."""

  def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch):
    self.kind = kind
    self.faults: list[Exception | None] = []
    self.calls: list[fake_sdks.Call] = []
    monkeypatch.setitem(sys.modules, kind, getattr(fake_sdks, kind)(self.faults, self.calls))

  def use(self, body: Callable[[Any], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """What ``body`` of a started back end gives; the calls of the start are left out."""

    async def main() -> Any:
      config: Any = SandboxConfig.from_dict({"use": self.kind, **settings})
      config.python = getattr(sys, "_base_executable", sys.executable)
      sandbox: Any = config.build()
      try:
        assert await sandbox.start() == frozenset()  # nobody here can see the vendor's walls
        self.calls.clear()
        return await body(sandbox)
      finally:
        await sandbox.close()

    return asyncio.run(main())

  def run(self, program: Any, **settings: Any) -> Any:
    async def body(sandbox: Any) -> Any:
      box = await sandbox.create()
      try:
        return await box.exec(program, limits=SandboxLimits(wall_seconds=10.0))
      finally:
        await box.close()

    return self.use(body, **settings)


@pytest.fixture(params=KINDS)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vendor:
  return Vendor(request.param, monkeypatch)


def test_sandbox_is_asked_for_as_set_and_ended_once(vendor: Vendor) -> None:
  settings = {"env": ["A=1=2"], "metadata": ["run=7"], "lifetime_seconds": 90.0}
  result = vendor.run(Command(("printenv", "A")), **settings)
  assert result.stdout == "1=2\n", result
  name, positional, keywords = vendor.calls[0]
  assert name == "create"
  if vendor.kind == "e2b":
    assert (keywords["envs"], keywords["metadata"]) == ({"A": "1=2"}, {"run": "7"})
    assert (keywords["timeout"], keywords["allow_internet_access"]) == (90, False)
  else:
    (asked,) = positional
    assert (asked.env_vars, asked.labels) == ({"A": "1=2"}, {"run": "7"})
    assert (asked.ttl_minutes, asked.network_block_all, asked.ephemeral) == (2, True, True)
    assert vendor.calls[-1][0] == "client.close"
  assert [name for name, _, _ in vendor.calls].count(ENDS[vendor.kind]) == 1


def test_fault_of_the_service_is_no_failure_of_the_program(vendor: Vendor) -> None:
  async def body(sandbox: Any) -> None:
    box = await sandbox.create()
    vendor.faults[:] = [None, OSError("no route")]  # the upload, then the run
    result = await box.exec(PythonScript("print(1)"))
    assert result.status is RunStatus.INFRA_ERROR
    assert "no route" in result.detail
    assert [name for name, _, _ in vendor.calls].count(RUN[vendor.kind]) == 1  # it may have run
    assert (await box.exec(PythonScript("print(1)"))).stdout == "1\n"
    vendor.faults[:] = [OSError("no answer")]
    await box.close()  # told in the log: the sandbox ends when its time is over
    vendor.faults[:] = [OSError("no room")]
    with pytest.raises(InfraError, match="no room"):
      await sandbox.create()

  vendor.use(body)


def test_report_is_read_again_before_anybody_is_blamed(vendor: Vendor) -> None:
  reads = "files.read" if vendor.kind == "e2b" else "fs.download_file_stream"

  async def body(sandbox: Any) -> None:
    box = await sandbox.create()
    vendor.faults[:] = [None, None, OSError("cut off")]  # upload, run, first read
    assert (await box.exec(PythonScript("print(1)"))).stdout == "1\n"
    vendor.calls.clear()
    vendor.faults[:] = [None, None, *[OSError("cut off")] * 5]
    result = await box.exec(PythonScript("print(1)"))
    assert (result.status, "cut off" in result.detail) == (RunStatus.INFRA_ERROR, True)
    assert [name for name, _, _ in vendor.calls].count(reads) == 2  # then its next run fails, too

  vendor.use(body)


def test_silent_service_is_given_up(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
  async def silent(*arguments: Any) -> None:
    await asyncio.sleep(60.0)

  async def body(sandbox: Any) -> Any:
    box = await sandbox.create()
    monkeypatch.setattr(sandbox.provider, "upload", silent)
    sandbox.config.call_seconds = 0.1
    with pytest.raises(InfraError, match="no answer within 0.1 s"):
      await box.upload("a", b"")

  vendor.use(body)


def test_long_command_of_many_quotes_is_no_fault_of_the_service(vendor: Vendor) -> None:
  result = vendor.run(Command(("printf", "%s", "'\"" * 30_000)))
  assert (result.status, result.stdout[:2], len(result.stdout)) == (RunStatus.OK, "'\"", 60_000)


WHO_WATCHES = """
import os, signal
def parent(pid):
  with open(f"/proc/{pid}/stat") as file:
    return int(file.read().rpartition(")")[2].split()[1])
"""
HOSTILE = {
  "ends the script that watches": "os.kill(parent(os.getppid()), signal.SIGKILL)",
  "ends the timer": "os.kill(os.getppid(), signal.SIGKILL)",
  "its output is endless": (
    "name, = [n for n in os.listdir('..') if n.endswith('.out')]\n"
    "os.unlink(f'../{name}')\nos.symlink('/dev/zero', f'../{name}')"
  ),
  "hides the report": (
    "name, = [n for n in os.listdir('..') if n.endswith('.out')]\n"
    "os.mkdir('../' + name[:-3] + 'report')\nos.mkdir('../' + name[:-3] + 'report/x')"
  ),
  "writes the report in its place": (
    "os.kill(parent(os.getppid()), signal.SIGKILL)\n"
    "name, = [n for n in os.listdir('..') if n.endswith('.out')]\n"
    "open('../' + name[:-3] + 'report', 'w').write('0 1 1\\n' + 'x' * 10**7)"
  ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_program_that_meddles_with_its_report_is_not_excused(vendor: Vendor, attack: str) -> None:
  result = vendor.run(PythonScript(WHO_WATCHES + HOSTILE[attack]))
  assert result.status is RunStatus.KILLED, result
  assert len(result.stdout) < 2**17


@pytest.mark.parametrize(
  "forged",
  [
    None,
    b"",
    b"0 1\nx",
    b"0 1 1 1\nxyz",
    b"0 -1 1\n",
    b"999 0 0\n",
    b"0 0 0\nx",
    b"x 0 0\n",
    b"\xff",
  ],
)
def test_forged_report_is_the_programs_doing_and_not_the_services(forged: bytes | None) -> None:
  result = rented._result(forged, 0.1, SandboxLimits())
  assert (result.status, result.fault) == (RunStatus.KILLED, None)


def test_outputs_come_back_head_and_tail_from_the_report() -> None:
  limits = SandboxLimits(output_bytes=4)
  result = rented._result(b"3 6 2\nabefxy", 0.1, limits)
  assert (result.status, result.exit_code) == (RunStatus.ERROR, 3)
  assert (result.stdout, result.stderr) == ("ab\n[... 2 bytes left out ...]\nef", "xy")


def test_not_a_chunk_more_is_read_than_is_wanted() -> None:
  given = 0

  async def endless() -> AsyncIterator[bytes]:
    nonlocal given
    while True:
      given += 1
      yield b"x" * 10

  assert asyncio.run(rented.first_bytes(endless(), 25)) == b"x" * 25
  assert given == 3


def test_what_a_program_left_is_its_fault_when_it_cannot_be_read(vendor: Vendor) -> None:
  async def body(sandbox: Any) -> None:
    box = await sandbox.create()
    await box.exec(Command(("mkfifo", "pipe")))
    with pytest.raises(BoxContentError, match="not a regular file"):
      await box.download("pipe")
    await box.upload("empty", b"")
    assert await box.download("empty") == b""
    assert await box.download("empty", max_bytes=0) == b""

  vendor.use(body)


def test_missing_sdk_names_the_extra(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, vendor.kind, None)
  with pytest.raises(SandboxError, match=rf"agentjax\[{vendor.kind}\]"):
    SandboxConfig.from_dict(vendor.kind).build()


def test_image_without_python_is_found_out_at_start(vendor: Vendor) -> None:
  config: Any = SandboxConfig.from_dict({"use": vendor.kind, "python": "no-such-python"})
  with pytest.raises(SandboxError, match="do not run Python programs.*no-such-python"):
    asyncio.run(config.build().start())
  assert [name for name, _, _ in vendor.calls].count(ENDS[vendor.kind]) == 1  # nothing is left


@pytest.mark.parametrize(
  ("settings", "field"), [({"workdir": "work"}, "workdir"), ({"env": ["A"]}, "env")]
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
  for kind in KINDS:
    with pytest.raises(ConfigError, match=rf"sandbox\.{field}="):
      SandboxConfig.from_dict({"use": kind, **settings}, "sandbox").validate("sandbox")


def test_calls_fit_the_real_sdk(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
  vendor.run(PythonScript("print(1)"))
  calls = list(vendor.calls)
  monkeypatch.undo()
  sdk = pytest.importorskip(vendor.kind, reason=f"needs agentjax[{vendor.kind}]")
  if vendor.kind == "e2b":
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.filesystem.filesystem import Filesystem

    real: dict[str, Any] = {
      "create": sdk.AsyncSandbox.create,
      "commands.run": Commands.run,
      "files.write": Filesystem.write,
      "files.read": Filesystem.read,
      "kill": sdk.AsyncSandbox.kill,
    }
    assert issubclass(sdk.FileNotFoundException, sdk.NotFoundException)
    assert issubclass(sdk.CommandExitException, Exception)
  else:
    from daytona._async.filesystem import AsyncFileSystem
    from daytona._async.process import AsyncProcess

    real = {
      "create": sdk.AsyncDaytona.create,
      "process.exec": AsyncProcess.exec,
      "fs.upload_file": AsyncFileSystem.upload_file,
      "fs.download_file_stream": AsyncFileSystem.download_file_stream,
      "delete": sdk.AsyncSandbox.delete,
      "client.close": sdk.AsyncDaytona.close,
    }
    (asked,) = calls[0][1]
    wanted = dict(vars(asked), resources=sdk.Resources(**vars(asked.resources)))
    params = sdk.CreateSandboxFromImageParams(**wanted)
    assert set(wanted) <= set(type(params).model_fields)
    assert issubclass(sdk.DaytonaNotFoundError, Exception)
  assert {name for name, _, _ in calls} == set(real)
  for name, positional, keywords in calls:
    signature = inspect.signature(real[name])
    bound = positional if inspect.ismethod(real[name]) else (None, *positional)
    signature.bind(*bound, **keywords)
    known = set(signature.parameters)
    assert set(keywords) <= known | {"request_timeout"}, name
