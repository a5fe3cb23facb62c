"""Jails by bubblewrap and nsjail: what they are asked for, and what holds inside."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from agentjax.adapters.sandboxes.bubblewrap import (
  BUBBLEWRAP,
  NSJAIL,
  JailCommand,
  Jailer,
  JailerConfig,
  JailerSandbox,
  bubblewrap_command,
  nsjail_command,
)
from agentjax.config import ConfigError
from agentjax.sandbox.interface import (
  Command,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  run_once,
)
from tests.sandbox.process_table import alive, pids

INSTALLED = [jailer for jailer in (BUBBLEWRAP, NSJAIL) if shutil.which(jailer.program)]


@pytest.fixture(scope="module", params=INSTALLED, ids=lambda jailer: jailer.name)
def sandbox(request: pytest.FixtureRequest) -> Iterator[JailerSandbox]:
  sandbox = JailerSandbox(request.param, JailerConfig(allow_unisolated=True))
  try:
    asyncio.run(sandbox.start())
  except SandboxError as error:
    pytest.skip(f"this machine does not let {request.param.name} work: {error}")
  yield sandbox
  asyncio.run(sandbox.close())


def run(sandbox: JailerSandbox, source: str, **limits: Any) -> SandboxResult:
  bounds = SandboxLimits(**{"wall_seconds": 10.0, **limits})
  return asyncio.run(run_once(sandbox, PythonScript(source), limits=bounds))


def _command(uid: int | None) -> JailCommand:
  return JailCommand(
    "/tools/jailer",
    ("/usr", "/opt/deep/python"),
    "/boxes/1",
    uid,
    7,
    9.5,
    ("/bin/python", "-c", "x"),
  )


def test_bubblewrap_is_asked_for_every_wall() -> None:
  argv = bubblewrap_command(_command(None))
  assert argv[0] == "/tools/jailer"
  for flag in ("pid", "net", "ipc", "uts", "cgroup-try", "user"):
    assert f"--unshare-{flag}" in argv
  assert {"--die-with-parent", "--new-session", "--as-pid-1"} <= set(argv)
  text = " ".join(argv)
  assert "--ro-bind /usr /usr " in text
  assert "--perms 0755 --dir /opt --perms 0755 --dir /opt/deep " in text
  assert "--ro-bind /opt/deep/python /opt/deep/python " in text
  # The one writable place; what bubblewrap made itself is closed after everything is mounted.
  assert text.count("--bind ") == 1
  assert "--bind /boxes/1 /work " in text
  assert text.index("--remount-ro /") > text.index("--symlink /work /tmp")
  assert argv[-4:] == ["--", "/bin/python", "-c", "x"]
  other_user = bubblewrap_command(_command(5000))
  assert "--unshare-user" not in other_user
  assert " ".join(other_user).count("--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID") == 1


def test_nsjail_is_asked_for_every_wall() -> None:
  text = " ".join(nsjail_command(_command(5000)))
  assert text.startswith("/tools/jailer --mode o ")
  assert "--disable_clone" not in text  # all its namespaces are on by default
  assert "--user 1000:5000:1 --group 1000:5000:1" in text
  assert "--bindmount_ro /usr --bindmount_ro /opt/deep/python" in text
  assert "--bindmount /boxes/1:/work" in text
  assert "--pass_fd 7" in text
  assert "--time_limit 10" in text
  assert "--iface_no_lo" in text
  assert text.endswith("-- /bin/python -c x")
  assert f"--user 1000:{os.getuid()}:1" in " ".join(nsjail_command(_command(None)))


def test_missing_tool_is_named_with_the_way_out() -> None:
  absent = Jailer("bubblewrap", "no-such-tool", bubblewrap_command, changes_user=False)
  with pytest.raises(SandboxError, match="no-such-tool.*embedded"):
    asyncio.run(JailerSandbox(absent).start())


def test_tool_that_builds_no_jail_is_refused_and_says_why(tmp_path: Any) -> None:
  broken = tmp_path / "bwrap"
  broken.write_text("#!/bin/sh\necho 'bwrap: no namespaces here' >&2\nexit 1\n")
  broken.chmod(0o755)
  sandbox = JailerSandbox(BUBBLEWRAP, JailerConfig(path=str(broken), directory=str(tmp_path)))
  with pytest.raises(SandboxError, match="no namespaces here"):
    asyncio.run(sandbox.start())
  assert os.listdir(tmp_path) == ["bwrap"]


def test_walls_that_are_missing_are_found_out() -> None:
  if BUBBLEWRAP not in INSTALLED:
    pytest.skip("bubblewrap is not installed")

  def weakened(command: JailCommand) -> list[str]:
    return [a for a in bubblewrap_command(command) if a not in ("--unshare-pid", "--as-pid-1")]

  weak = Jailer("bubblewrap", "bwrap", weakened, changes_user=True)

  # Programs of this process's own user, which see its processes and the file they are to find.
  with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    sandbox = JailerSandbox(weak, JailerConfig(directory=folder, readable=(folder,)))
    missing = "descendants, processes, filesystem"
    with pytest.raises(SandboxError, match=f"{missing} .*allow_unisolated"):
      asyncio.run(sandbox.start())
    assert "user" not in sandbox.protections
    assert os.listdir(folder) == []


@pytest.mark.parametrize("field", ["require", "readable", "concurrency"])
def test_impossible_settings_are_refused_by_name(field: str) -> None:
  values: dict[str, Any] = {"require": ("walls",), "readable": ("/tmp/x",), "concurrency": 0}
  with pytest.raises(ConfigError, match=rf"sandbox\.{field}"):
    JailerSandbox(BUBBLEWRAP, JailerConfig(**{field: values[field]}))


def test_the_world_of_a_program_is_its_directory_and_the_system(sandbox: JailerSandbox) -> None:
  source = (
    "import json, os, socket\n"
    "def closed(f):\n  try: f()\n  except OSError: return True\n  return False\n"
    "print(json.dumps([sorted(os.listdir('/')), os.getcwd(), os.path.realpath('/tmp'),"
    "closed(lambda: open('/etc/passwd')), closed(lambda: open('/usr/x', 'w')),"
    "closed(lambda: os.mkdir('/new')), closed(lambda: socket.socket()),"
    "len([p for p in os.listdir('/proc') if p.isdigit()]), sorted(os.environ)]))"
  )
  result = run(sandbox, source)
  assert result.status is RunStatus.OK, result
  top, cwd, tmp, *closed, processes, environment = json.loads(result.stdout)
  assert not set(top) & {"home", "srv", "var", "mnt"}
  assert (cwd, tmp) == ("/work", "/work")
  assert closed == [True] * 4
  assert processes == 2  # the one that reaps, and itself
  assert not any("KEY" in name or "TOKEN" in name for name in environment)


def test_limits_hold_inside(sandbox: JailerSandbox) -> None:
  result = run(sandbox, "x = b'x' * 10**9")
  assert result.status is RunStatus.MEMORY_LIMIT, result
  shares = (
    "import os, time\nfor _ in range(4):\n  if os.fork() == 0: break\nx = b'x' * (20 << 20)\n"
  )
  result = run(sandbox, shares + "time.sleep(5)", memory_bytes=32 << 20)
  assert result.status is RunStatus.MEMORY_LIMIT, result
  result = run(sandbox, "while True: pass", cpu_seconds=1.0)
  assert (result.status, "CPU" in result.detail) == (RunStatus.TIMEOUT, True), result
  result = run(sandbox, "import os\nwhile True: os.fork()", processes=8)
  assert result.status in (RunStatus.ERROR, RunStatus.KILLED), result
  result = run(sandbox, "open('big', 'wb').write(bytes(2 << 20))", file_bytes=1 << 20)
  assert "File too large" in result.stderr, result
  many = (
    "for i in range(8):\n  open(str(i), 'wb').write(bytes(1 << 20))\nimport time\ntime.sleep(9)"
  )
  result = run(sandbox, many, disk_bytes=4 << 20)
  assert (result.status, "files hold" in result.detail) == (RunStatus.KILLED, True), result


def test_nothing_outlives_a_run(sandbox: JailerSandbox) -> None:
  marker = f"{uuid.uuid4().int % 10**9 + 10**9}"
  daemon = f"setsid sleep {marker} & sleep 0.2"
  result = asyncio.run(run_once(sandbox, Command(("sh", "-c", daemon))))
  assert result.status is RunStatus.OK, result
  assert not alive(f"sleep\0{marker}")
  endless = f"setsid sleep {marker} & sleep 60"
  limits = SandboxLimits(wall_seconds=0.5)
  result = asyncio.run(run_once(sandbox, Command(("sh", "-c", endless)), limits=limits))
  assert result.status is RunStatus.TIMEOUT, result
  assert not alive(f"sleep\0{marker}")


def test_program_cannot_pass_itself_off_as_a_fault_of_the_machine(sandbox: JailerSandbox) -> None:
  # An infrastructure fault would take the sample out of the loss.
  forge = (
    "import glob, os, signal\n"
    "for path in glob.glob('/proc/*/fd/*'):\n"
    "  try: os.write(os.open(path, os.O_WRONLY), b'error forged')\n"
    "  except OSError: pass\n"
    "for number in (9, 15, 11, 6):\n"
    "  try: os.kill(1, number)\n"
    "  except OSError: pass\n"
    "os._exit(4)"
  )
  result = run(sandbox, forge)
  assert (result.status, result.exit_code) == (RunStatus.ERROR, 4), result


def test_run_ends_with_the_process_that_asked_for_it(sandbox: JailerSandbox) -> None:
  marker = f"{uuid.uuid4().int % 10**9 + 10**9}"
  root = str(pathlib.Path(__file__).parents[3])
  owner = (
    "import asyncio, sys\nsys.path.insert(0, sys.argv[1])\n"
    "from agentjax.adapters.sandboxes import bubblewrap as b\n"
    "from agentjax.sandbox.interface import *\n"
    "sandbox = b.JailerSandbox(getattr(b, sys.argv[2].upper()), "
    "b.JailerConfig(allow_unisolated=True, directory=sys.argv[4]))\n"
    "asyncio.run(run_once(sandbox, Command(('sleep', sys.argv[3]))))"
  )
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o711)
    process = subprocess.Popen(
      [sys.executable, "-c", owner, root, sandbox.jailer.name, marker, folder]
    )
    deadline = time.monotonic() + 20.0
    while not alive(f"sleep\0{marker}"):
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.02)
    process.kill()
    process.wait()
    # bubblewrap goes with its parent; nsjail at the end of the run's time.
    while sandbox.jailer is BUBBLEWRAP and alive(f"sleep\0{marker}"):
      assert time.monotonic() < deadline
      time.sleep(0.02)
    for pid in pids(f"sleep\0{marker}"):
      os.kill(pid, signal.SIGKILL)
