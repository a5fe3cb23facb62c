"""Containers: what the engine is asked for, and what the back end makes of its answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import shlex
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentjax.adapters.sandboxes import guest
from agentjax.adapters.sandboxes.container import (
  ContainerConfig,
  ContainerSandbox,
  PodmanConfig,
  exec_command,
  run_command,
)
from agentjax.config import ConfigError
from agentjax.sandbox.interface import (
  Command,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
  run_once,
)
from tests.adapters.sandboxes.test_backends import fake_docker
from tests.sandbox.process_table import alive


class Engine:
  """The program that stands for docker; see fake_engine.py."""

  def __init__(self, folder: pathlib.Path):
    self.program = fake_docker(folder)
    self.state = folder / "state"

  def calls(self, command: str) -> list[list[str]]:
    lines = (self.state / "calls.jsonl").read_text().splitlines()
    return [call for call in map(json.loads, lines) if call[0] == command]

  def containers(self) -> list[str]:
    return [path.name for path in self.state.iterdir() if path.is_dir()]


@pytest.fixture
def engine(tmp_path: pathlib.Path) -> Engine:
  return Engine(tmp_path)


def use(
  engine: Engine, body: Callable[[ContainerSandbox], Coroutine[Any, Any, Any]], **settings: Any
) -> Any:
  """Runs ``body`` with a sandbox that need not be probed, and is closed afterwards."""

  async def main() -> Any:
    sandbox = ContainerSandbox(ContainerConfig(engine=engine.program, **settings))
    sandbox._started = True
    try:
      return await body(sandbox)
    finally:
      await sandbox.close()

  return asyncio.run(main())


def test_container_is_started_with_every_wall() -> None:
  limits = SandboxLimits(memory_bytes=2**28, disk_bytes=2**27, processes=10)
  config = ContainerConfig(runtime="runsc", cpus=1.5, limits=limits, arguments=("--extra",))
  argv = run_command(config, limits, "box-1")
  text = shlex.join(argv)
  assert argv[:2] == ["docker", "run"]
  for wanted in (
    "--detach --rm --init --pull never --name box-1",
    "--network none --read-only --cap-drop ALL --ipc none",
    "--security-opt no-new-privileges --user 65534:65534",
    "--pids-limit 42",  # and room for the engine's own
    f"--memory {2**28 + 2**27} --memory-swap {2**28 + 2**27}",  # the work directory is memory too
    "--cpus 1.5 --runtime runsc",
    f"--tmpfs /work:rw,exec,nosuid,nodev,size={2**27},mode=1777",
    "--extra --workdir /work --entrypoint sleep python:3.11-slim 21600",
  ):
    assert wanted in text, wanted
  for never in ("--privileged", "--volume", "-v", "--mount", "--cap-add", "host"):
    assert never not in argv
  plain = run_command(ContainerConfig(), limits, "box-1")
  assert "--runtime" not in plain and "--cpus" not in plain


def test_programs_run_as_another_user_under_the_shells_limits() -> None:
  limits = SandboxLimits(cpu_seconds=2.5, file_bytes=1024, open_files=64, processes=9)
  argv = exec_command("podman", "box-1", 20001, guest.limited(["ls"], limits), interactive=True)
  assert argv[:9] == [
    *("podman", "exec", "--interactive", "--user", "20001:20001", "--workdir", "/work", "box-1"),
    "sh",
  ]
  assert argv[-6:] == ["sh", "3", "2", "64", "9", "ls"]
  assert "--interactive" not in exec_command("podman", "b", 1, ["ls"], interactive=False)
  assert "--read-only-tmpfs=false" in run_command(PodmanConfig(), limits, "b")


def test_engine_without_walls_is_refused_and_leaves_nothing(engine: Engine) -> None:
  # The stand-in runs programs on this machine, so hardly anything can hold.
  with pytest.raises(
    SandboxError, match="does not grant here: (.*) \\(.*allow_unisolated"
  ) as error:
    asyncio.run(ContainerSandbox(ContainerConfig(engine=engine.program)).start())
  missing = str(error.value).partition("here: ")[2].partition(" (")[0]
  assert {"network", "processes", "filesystem"} <= set(missing.split(", "))
  assert engine.containers() == []


def test_box_is_removed_at_its_end_and_each_run_is_swept(engine: Engine) -> None:
  async def body(sandbox: ContainerSandbox) -> None:
    result = await run_once(sandbox, Command(("sh", "-c", "(setsid sleep 987654321 &)")))
    assert result.status is RunStatus.OK, result
    assert not alive("sleep\0987654321")
    assert engine.containers() == []
    sweeps = [call for call in engine.calls("exec") if "kill -9 -1" in call[-1]]
    assert len(sweeps) == 1
    users = {call[call.index("--user") + 1] for call in engine.calls("exec")}
    assert len(users) == 1 and not users & {"65534:65534", "0:0"}

  use(engine, body)


def test_containers_of_dead_processes_are_removed_at_start(engine: Engine) -> None:
  ours = f"agentjax-{os.getpid()}-1-aa"  # our process id, but of an earlier process
  for name in ("agentjax-999999999-5-bb", ours, "agentjax-1-0-cc", "someone-elses"):
    (engine.state / name).mkdir()

  use(engine, lambda sandbox: sandbox._remove_abandoned())
  left = set(engine.containers())
  assert left & {"agentjax-999999999-5-bb", ours} == set()
  assert "someone-elses" in left
  assert engine.calls("ps")[0][:4] == [
    "ps",
    "--all",
    "--filter",
    f"label=agentjax.host={os.uname().nodename}",
  ]


def test_container_too_full_to_be_swept_is_removed(engine: Engine) -> None:
  async def body(sandbox: ContainerSandbox) -> None:
    box = await sandbox.create()
    (engine.state / box.name / "full").touch()
    result = await box.exec(Command(("true",)))
    # It is the program's doing, so it is no fault of the machine that would excuse it.
    assert (result.status, "container" in result.detail) == (RunStatus.KILLED, True), result
    assert engine.containers() == []
    with pytest.raises(SandboxError, match="gone with its files"):
      await box.exec(Command(("true",)))

  use(engine, body)


def test_container_that_vanished_is_a_fault_of_the_machine(engine: Engine) -> None:
  async def body(sandbox: ContainerSandbox) -> None:
    box = await sandbox.create()
    await sandbox.engine([engine.program, "rm", "--force", box.name])
    result = await box.exec(Command(("true",)))
    assert (result.status, "no container" in result.detail) == (RunStatus.INFRA_ERROR, True), result
    with pytest.raises(SandboxError):
      await box.upload("x", b"")

  use(engine, body)


def test_waiting_for_a_place_ends_as_a_fault_of_the_machine(engine: Engine) -> None:
  async def body(sandbox: ContainerSandbox) -> Any:
    sleep = PythonScript("import time\ntime.sleep(0.8)")
    boxes = [await sandbox.create() for _ in range(2)]
    return await asyncio.gather(*(box.exec(sleep) for box in boxes))

  settings = {"concurrency": 1, "queue_seconds": 0.2, "python": "python3"}
  assert sorted(r.status for r in use(engine, body, **settings)) == ["infra_error", "ok"]


def test_missing_image_and_missing_engine_say_what_to_do(engine: Engine) -> None:
  with pytest.raises(SandboxError, match="image not known.*pull absent"):
    use(engine, lambda sandbox: sandbox.create(), image="absent")
  assert engine.containers() == []
  with pytest.raises(SandboxError, match="'no-such-engine' in PATH"):
    asyncio.run(ContainerSandbox(ContainerConfig(engine="no-such-engine")).start())


def test_bounds_of_the_container_cannot_be_changed_for_a_run(engine: Engine) -> None:
  async def body(sandbox: ContainerSandbox) -> None:
    box = await sandbox.create()
    for field in ("memory_bytes", "processes", "disk_bytes"):
      limits = dataclasses.replace(SandboxLimits(), **{field: 2**25})
      with pytest.raises(SandboxError, match=rf"{field}=33554432.*ContainerConfig\.limits"):
        await box.exec(Command(("true",)), limits=limits)

  use(engine, body)


@pytest.mark.parametrize(
  ("settings", "field"),
  [({"image": ""}, "image"), ({"cpus": 0.0}, "cpus"), ({"require": ("walls",)}, "require")],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
  with pytest.raises(ConfigError, match=rf"sandbox\.{field}"):
    ContainerSandbox(ContainerConfig(**settings))
