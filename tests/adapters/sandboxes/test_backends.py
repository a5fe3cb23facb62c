"""One list of behaviours, held by every back end that can be had on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import stat
import sys
import unittest.mock
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from agentjax.adapters.sandboxes.sandbox_fusion import FusionConfig
from agentjax.config import ConfigError
from agentjax.sandbox import ProcessSandbox, ProcessSandboxConfig, Sandboxes
from agentjax.sandbox.config import SandboxConfig
from agentjax.sandbox.interface import (
  Command,
  PythonCell,
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  run_once,
)
from tests.adapters.sandboxes import fake_sdks

LIMITS = SandboxLimits(wall_seconds=15.0)
REAL_ENGINE = os.environ.get("AGENTJAX_CONTAINER_ENGINE")  # and AGENTJAX_CONTAINER_IMAGE
KINDS = ["embedded", "bubblewrap", "nsjail", "fake_docker", "fusion", "e2b", "daytona"]
if REAL_ENGINE is not None:
  KINDS.append("container")


def fake_docker(folder: pathlib.Path) -> str:
  """A program that stands for docker, with its state in ``folder``."""
  script = pathlib.Path(__file__).with_name("fake_engine.py")
  interpreter = getattr(sys, "_base_executable", sys.executable)
  program = folder / "docker"
  program.write_text(f'#!/bin/sh\nexec {interpreter} -S {script} {folder}/state "$@"\n')
  program.chmod(program.stat().st_mode | stat.S_IXUSR)
  (folder / "state").mkdir()
  return str(program)


@contextlib.contextmanager
def opened(kind: str, folder: pathlib.Path) -> Iterator[Sandbox]:
  config: Any = ProcessSandboxConfig()
  with contextlib.ExitStack() as held:
    if kind in ("bubblewrap", "nsjail"):
      if shutil.which({"bubblewrap": "bwrap", "nsjail": "nsjail"}[kind]) is None:
        pytest.skip(f"{kind} is not installed")
      config = SandboxConfig.from_name(kind, "sandbox")
      config.allow_unisolated = True  # a container may grant less
    elif kind == "fake_docker":
      config = SandboxConfig.from_name("docker", "sandbox")
      config.engine = fake_docker(folder)
      config.python = getattr(sys, "_base_executable", sys.executable)
      config.allow_unisolated = True
    elif kind == "container":
      assert REAL_ENGINE is not None
      kind = "podman" if "podman" in REAL_ENGINE else "docker"
      config = SandboxConfig.from_name(kind, "sandbox")
      config.engine, config.image = REAL_ENGINE, os.environ["AGENTJAX_CONTAINER_IMAGE"]
    elif kind == "fusion":
      from tests.adapters.sandboxes.service import Service

      config = SandboxConfig.from_name(kind, "sandbox")
      service = Service()
      held.callback(service.close)
      config.service.urls = (service.url,)
    elif kind in ("e2b", "daytona"):
      sdk = getattr(fake_sdks, kind)([], [])
      held.enter_context(unittest.mock.patch.dict(sys.modules, {kind: sdk}))
      config = SandboxConfig.from_name(kind, "sandbox")
      config.python = getattr(sys, "_base_executable", sys.executable)
    sandbox = config.build()
    held.callback(lambda: asyncio.run(sandbox.close()))
    yield sandbox


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Sandbox]:
  if request.param == "fusion":
    pytest.importorskip("aiohttp", reason="remote back ends need agentjax[web]")
  with opened(request.param, tmp_path_factory.mktemp(request.param)) as sandbox:
    yield sandbox


def use(sandbox: Sandbox, body: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
  """Runs ``body`` with a box that is closed afterwards."""

  async def main() -> Any:
    box = await sandbox.create()
    try:
      return await body(box)
    finally:
      await box.close()

  return asyncio.run(main())


def test_a_cell_a_script_and_a_command_end_as_everywhere(sandbox: Sandbox) -> None:
  source = "import random\nprint(round(random.random(), 6))\n6 * 7"

  async def body(box: Any) -> Any:
    return [
      await box.exec(PythonCell(source, seed=5), limits=LIMITS),
      await box.exec(PythonScript("import os\nraise ValueError(sorted(os.listdir('.')))")),
      await box.exec(Command(("sh", "-c", "cat; echo err >&2; exit 3")), stdin=b"in"),
      await box.exec(Command(("sh", "-c", "kill -9 $$"))),
      await box.exec(Command(("no-such-program",))),
    ]

  cell, script, command, killed, missing = use(sandbox, body)
  assert (cell.status, cell.stdout) == (RunStatus.OK, "0.622902\n42\n"), cell
  assert (script.status, script.exit_code) == (RunStatus.ERROR, 1), script
  assert script.stderr.endswith("ValueError: []\n")  # nothing of ours lies in the work directory
  assert script.stderr.count("File ") == 1  # nor are frames of ours in a traceback
  shown = (command.status, command.exit_code, command.stdout, command.stderr)
  assert shown == (RunStatus.ERROR, 3, "in", "err\n"), command
  assert (killed.status, killed.exit_code) == (RunStatus.KILLED, -9), killed
  assert (missing.status, missing.exit_code) == (RunStatus.ERROR, 127), missing


def test_time_is_over_and_what_was_printed_until_then_is_not_lost(sandbox: Sandbox) -> None:
  program = PythonScript("import time\nprint('before', flush=True)\ntime.sleep(60)")
  limits = SandboxLimits(wall_seconds=1.0)
  result = use(sandbox, lambda box: box.exec(program, limits=limits))
  assert result.status is RunStatus.TIMEOUT, result
  assert result.seconds < 10.0
  assert result.stdout == "before\n"


def test_output_keeps_head_and_tail_and_a_flood_is_ended(sandbox: Sandbox) -> None:
  async def body(box: Any) -> Any:
    cut = SandboxLimits(output_bytes=11, wall_seconds=15.0)
    flood = SandboxLimits(output_bytes=1000, output_kill_bytes=10**5, wall_seconds=15.0)
    return [
      await box.exec(PythonScript("print('0123456789' * 10, end='')"), limits=cut),
      await box.exec(PythonScript("print('x' * 10**6)"), limits=flood),
    ]

  cut, flood = use(sandbox, body)
  assert cut.stdout == "012345\n[... 89 bytes left out ...]\n56789", cut
  assert (cut.status, cut.truncated) == (RunStatus.OK, True)
  assert (flood.status, flood.truncated) == (RunStatus.OUTPUT_LIMIT, True), flood
  assert len(flood.stdout) < 1100


def test_files_go_in_and_come_out_and_stay_from_run_to_run(sandbox: Sandbox) -> None:
  async def body(box: Any) -> None:
    await box.upload("data/in.txt", b"one\xff")
    source = (
      "import os\nos.makedirs('made')\n"
      "open('made/out', 'wb').write(open('data/in.txt', 'rb').read() + open('b', 'rb').read())"
    )
    result = await box.exec(PythonScript(source), files={"b": b"2"})
    assert result.status is RunStatus.OK, result
    assert await box.download("made/out") == b"one\xff2"
    result = await box.exec(Command(("cat", "made/out", "b")))
    assert result.stdout == "one\\xff22"
    for path in ("missing", "made"):
      with pytest.raises(SandboxError):
        await box.download(path)
    with pytest.raises(SandboxError, match="max_bytes"):
      await box.download("made/out", max_bytes=3)
    for path in ("../x", "/etc/x", ""):
      with pytest.raises(SandboxError, match="not a path inside"):
        await box.upload(path, b"x")

  use(sandbox, body)


def test_snapshot_opens_as_another_box_with_the_same_files(sandbox: Sandbox) -> None:
  assert sandbox.capabilities.snapshot

  async def body(box: Any) -> bytes:
    await box.upload("a/b", b"deep")
    state = await box.snapshot()
    assert state == await box.snapshot()
    copy = await sandbox.create(state)
    try:
      result = await copy.exec(PythonScript("print(open('a/b').read())\nopen('c', 'w').write('d')"))
      assert result.stdout == "deep\n", result
      assert await copy.download("c") == b"d"
      with pytest.raises(SandboxError):
        await box.download("c")
    finally:
      await copy.close()
    with pytest.raises(SandboxError, match="snapshot"):
      await sandbox.create(b"not a tar" * 100)
    return state

  state = use(sandbox, body)

  async def moved() -> bytes:
    embedded = ProcessSandbox()
    try:
      return await (await embedded.create(state)).download("a/b")
    finally:
      await embedded.close()

  assert asyncio.run(moved()) == b"deep"


def test_cancelled_run_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
  async def body(box: Any) -> None:
    task = asyncio.create_task(box.exec(PythonScript("import time\ntime.sleep(60)")))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert (await box.exec(PythonCell("1"))).stdout == "1\n"

  use(sandbox, body)


def test_closing_a_box_ends_its_run_and_it_stays_closed(sandbox: Sandbox) -> None:
  async def body(box: Any) -> None:
    task = asyncio.create_task(box.exec(PythonScript("import time\ntime.sleep(60)")))
    await asyncio.sleep(0.5)
    await box.close()
    assert (await task).status is RunStatus.KILLED
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
      await box.exec(PythonCell("1"))
    with pytest.raises(SandboxError, match="closed"):
      await box.download("x")

  use(sandbox, body)


def test_boxes_run_side_by_side_and_keep_apart(sandbox: Sandbox) -> None:
  async def body() -> Any:
    program = "import os\nprint(sorted(os.listdir('.')))\nopen('{0}', 'w')\n{0} ** 2"
    runs = (run_once(sandbox, PythonCell(program.format(i))) for i in range(4))
    return await asyncio.gather(*runs)

  assert [r.stdout for r in asyncio.run(body())] == [f"[]\n{i * i}\n" for i in range(4)]


def test_sessions_are_there_where_offered_and_refused_elsewhere(sandbox: Sandbox) -> None:
  async def body(box: Any) -> None:
    if not sandbox.capabilities.sessions:
      with pytest.raises(SandboxError, match="sessions"):
        await box.session()
      return
    session = await box.session()
    assert [(await session.run(cell)).stdout for cell in ("x = 2", "x + 1")] == ["", "3\n"]
    await session.close()

  use(sandbox, body)


def test_settings_are_named_by_kind_and_come_back_from_plain_data() -> None:
  config = FusionConfig()
  with pytest.raises(ConfigError, match=r"sandbox\.service\.urls"):
    config.validate("sandbox")
  config.service.urls = ("http://127.0.0.1:1",)
  config.limits.wall_seconds = 3.0
  config.validate("sandbox")
  assert config.to_short_dict() == {
    "use": "fusion",
    "limits": {"wall_seconds": 3.0},
    "service": {"urls": ["http://127.0.0.1:1"]},
  }
  for saved in (config.to_dict(), config.to_short_dict()):
    assert SandboxConfig.from_dict(json.loads(json.dumps(saved))) == config
  assert (config.overhead_seconds, ProcessSandboxConfig().overhead_seconds) == (30.0, 0.0)
  assert SandboxConfig.from_dict("podman").to_dict()["arguments"] == ["--read-only-tmpfs=false"]
  for wrong in ("chroot", "agentjax.worlds.sql.tool:SqlConfig"):
    with pytest.raises(ConfigError, match=r"sandbox\.use='.*'embedded', 'bubblewrap'|is SqlConfig"):
      SandboxConfig.from_dict(wrong, "sandbox")


def test_a_sandbox_has_a_name_and_what_needs_packages_says_so() -> None:
  plain, small = ProcessSandboxConfig(packages=("numpy",)), ProcessSandboxConfig(concurrency=1)
  sandboxes = Sandboxes({"default": plain, "small": small})
  assert sandboxes.settings("small") == small
  wanted = sandboxes.settings("default", packages=("pytest", "numpy"))
  assert wanted == ProcessSandboxConfig(packages=("numpy", "pytest"))
  assert plain.packages == ("numpy",)
  with pytest.raises(ConfigError, match=r"tool\.sandbox='big'; allowed: .*default, small"):
    sandboxes.settings("big", "tool.sandbox")
