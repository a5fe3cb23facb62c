"""Memory groups: the kernel's bound on all that a run holds.

Few machines that tests run on delegate a group. Where one does, ``AGENTJAX_TEST_CGROUP`` names its
folder, with memory and pids in ``cgroup.subtree_control``; see docs/security.md.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from agentjax.sandbox import PythonScript, RunStatus, SandboxError, SandboxLimits, run_once
from agentjax.sandbox.groups import Group
from agentjax.sandbox.process import ProcessSandbox
from tests.sandbox.test_process import use

FOLDER = os.environ.get("AGENTJAX_TEST_CGROUP", "")
MEBIBYTE = 2**20
LIMITS = SandboxLimits(
  wall_seconds=30.0, memory_bytes=32 * MEBIBYTE, disk_bytes=MEBIBYTE, open_files=2048
)
needs_group = pytest.mark.skipif(not FOLDER, reason="AGENTJAX_TEST_CGROUP names no group")
# Pages of the kernel, which no process's size shows.
_FILL_SOCKETS = """
import socket
held = []
for _ in range(600):
  held.append(socket.socketpair())
  held[-1][0].setblocking(False)
  try:
    while True: held[-1][0].send(bytes(4096))
  except BlockingIOError: pass
print("REACHED")
"""


def with_groups(body: Any) -> Any:
  return use(body, cgroup=FOLDER)


def groups() -> list[str]:
  return [name for name in os.listdir(FOLDER) if name.startswith("agentjax-")]


@pytest.mark.parametrize("folder", ["", "missing"])
def test_folder_that_grants_no_groups_is_refused_by_name(
  tmp_path: pathlib.Path, folder: str
) -> None:
  with pytest.raises(SandboxError, match=r"sandboxes\.NAME\.cgroup"):
    use(lambda sandbox: sandbox.start(), cgroup=str(tmp_path / folder))
  assert list(tmp_path.iterdir()) == []


def test_group_that_the_kernel_killed_in_is_told_from_others(tmp_path: pathlib.Path) -> None:
  """With a kernel's text of 6.1; only ``oom_kill`` says that something ended."""
  (tmp_path / "one").mkdir()
  folder = os.open(tmp_path, os.O_RDONLY)
  group = Group(folder, "one")
  assert not group.ran_out()
  for kills, expected in ((0, False), (2, True)):
    text = f"low 0\nhigh 0\nmax 41\noom 1\noom_kill {kills}\noom_group_kill 1\n"
    (tmp_path / "one" / "memory.events").write_text(text)
    assert group.ran_out() is expected
  os.close(folder)


@needs_group
def test_kernel_memory_of_a_run_is_bounded() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    await sandbox.start()
    assert "memory_group" in sandbox.mechanisms
    result = await run_once(sandbox, PythonScript(_FILL_SOCKETS), limits=LIMITS)
    assert (result.status, result.stdout) == (RunStatus.MEMORY_LIMIT, ""), result

  with_groups(body)


@needs_group
def test_ordinary_ends_stay_what_they_are() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    for source, status in (
      ("print(len(bytes(2**23)))", RunStatus.OK),
      ("1 / 0", RunStatus.ERROR),
      ("import os; os.kill(os.getpid(), 9)", RunStatus.KILLED),
      ("x = bytearray(2**30)", RunStatus.MEMORY_LIMIT),
    ):
      result = await run_once(sandbox, PythonScript(source), limits=LIMITS)
      assert result.status is status, result

  with_groups(body)


@needs_group
def test_pages_of_the_disk_have_room_beside_the_memory() -> None:
  fill = "with open('x', 'wb') as file:\n  for _ in range(100): file.write(bytes(2**20))"

  async def body(sandbox: ProcessSandbox) -> None:
    limits = SandboxLimits(
      wall_seconds=30.0,
      memory_bytes=16 * MEBIBYTE,
      disk_bytes=64 * MEBIBYTE,
      file_bytes=2**30,
    )
    result = await run_once(sandbox, PythonScript(fill), limits=limits)
    assert result.status is RunStatus.ERROR
    assert "No space left" in result.stderr

  with_groups(body)


@needs_group
def test_cell_that_takes_too_much_ends_its_interpreter_alone() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    session = await box.session(limits=LIMITS)
    assert (await session.run("x = 1")).status is RunStatus.OK
    assert len(groups()) == 1
    assert (await session.run(_FILL_SOCKETS)).status is RunStatus.MEMORY_LIMIT
    again = await session.run("'x' in globals()")
    assert (again.stdout, again.restarted) == ("False\n", True)

  with_groups(body)


@needs_group
def test_group_has_the_bounds_of_the_run() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    session = await box.session(limits=LIMITS)
    await session.run("1")
    (name,) = groups()
    folder = pathlib.Path(FOLDER) / name
    assert len((folder / "cgroup.procs").read_text().split()) == 1
    assert int((folder / "pids.max").read_text()) == LIMITS.processes
    assert int((folder / "memory.max").read_text()) >= LIMITS.memory_bytes + LIMITS.disk_bytes
    assert (folder / "memory.oom.group").read_text() == "1\n"

  with_groups(body)


@needs_group
def test_no_group_is_left_and_those_of_the_dead_are_removed() -> None:
  left = pathlib.Path(FOLDER) / f"agentjax-{2**22 + 1}-left"
  left.mkdir()

  async def body(sandbox: ProcessSandbox) -> None:
    await sandbox.start()
    assert not left.exists()
    for source in ("1", "1 / 0", "import time; time.sleep(9)"):
      limits = SandboxLimits(wall_seconds=1.0)
      await run_once(sandbox, PythonScript(source), limits=limits)

  with_groups(body)
  assert groups() == []
