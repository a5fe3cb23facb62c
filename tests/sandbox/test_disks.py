"""The disk of a box: its bounds, what it was given, what becomes of it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
from typing import Any

import pytest

from agentjax.faults import Boundary, fault_of
from agentjax.sandbox import (
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
  run_once,
)
from agentjax.sandbox.interface import BoxContentError
from agentjax.sandbox.measure import children
from agentjax.sandbox.process import ProcessBox, ProcessSandbox
from tests.sandbox.machines import MACHINES, Machine, NoMachine
from tests.sandbox.test_process import use

MEBIBYTE = 2**20
LIMITS = SandboxLimits(wall_seconds=5.0, disk_bytes=8 * MEBIBYTE, files=20)
FILL = """
held = 0
try:
  while True:
    held += open("fill", "ab", buffering=0).write(bytes(2**16))
except OSError as error:
  print(held, error.strerror)
"""
COUNT = """
try:
  for number in range(1000): open(f"n{number}", "x")
except OSError as error:
  print(number, error.strerror)
"""


def with_box(body: Any, **settings: Any) -> Any:
  async def main(sandbox: ProcessSandbox) -> Any:
    await sandbox.start()
    if "disk_in_memory" not in sandbox.mechanisms:
      pytest.skip("this machine grants no mounts")
    return await body(sandbox, await sandbox.create())

  return use(main, **{"limits": LIMITS, **settings})


async def printed(box: ProcessBox, source: str, **arguments: Any) -> str:
  result = await box.exec(PythonScript(source), **{"limits": LIMITS, **arguments})
  assert result.status is RunStatus.OK, result
  return result.stdout


def test_full_disk_is_an_error_that_the_program_meets_at_the_very_byte() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    assert await printed(box, FILL) == f"{LIMITS.disk_bytes} No space left on device\n"
    other = await sandbox.create()
    assert await printed(other, COUNT) == f"{LIMITS.files} No space left on device\n"

  with_box(body)


def test_what_a_box_was_given_at_its_start_takes_none_of_the_room() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    await box.upload("a/given", bytes(3 * MEBIBYTE))
    files = {"b/also": bytes(2 * MEBIBYTE)}
    assert await printed(box, FILL, files=files) == f"{LIMITS.disk_bytes} No space left on device\n"
    full = LIMITS.disk_bytes + 5 * MEBIBYTE
    assert sum(os.stat(f"{box._root()}/{n}").st_size for n in ("fill", "a/given", "b/also")) == full
    await box.exec(PythonScript("import os; os.unlink('fill')"), limits=LIMITS)
    snapshot = await box.snapshot()
    assert len(snapshot) > 5 * MEBIBYTE
    copy = await sandbox.create(snapshot)
    assert await printed(copy, FILL) == f"{LIMITS.disk_bytes} No space left on device\n"

  with_box(body)


def test_snapshot_of_many_small_files_has_room() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    limits = SandboxLimits(files=5000, disk_bytes=64 * MEBIBYTE)
    await printed(box, "for n in range(4000): open(str(n), 'w').write('x')", limits=limits)
    copy = await sandbox.create(await box.snapshot())
    assert await printed(copy, "import os; print(len(os.listdir('.')))") == "4000\n"

  with_box(body)


def test_file_for_a_box_that_the_program_filled_is_the_programs_fault() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    await printed(box, FILL)
    for put in (
      lambda: box.upload("late", bytes(2 * MEBIBYTE)),
      lambda: box.exec(PythonScript("1"), files={"late": bytes(2 * MEBIBYTE)}, limits=LIMITS),
    ):
      with pytest.raises(BoxContentError, match="No space left") as raised:
        await put()
      assert not fault_of(raised.value, Boundary.TOOL).masks
    assert await printed(box, "import os; print(os.stat('fill').st_size)") == "8388608\n"

  with_box(body)


def test_bounds_are_those_of_each_run() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    small = SandboxLimits(disk_bytes=MEBIBYTE, files=20)
    assert (await printed(box, FILL, limits=small)).startswith(f"{MEBIBYTE} ")
    assert (await printed(box, FILL)).startswith(f"{7 * MEBIBYTE} ")
    # It holds more than the next run may have: nothing is lost, and nothing can be added.
    assert (await printed(box, FILL, limits=small)).startswith("0 ")
    nothing = SandboxLimits(disk_bytes=0, files=0)
    other = await sandbox.create()
    result = await other.exec(PythonScript("open('x', 'w')"), limits=nothing)
    assert "No space left" in result.stderr

  with_box(body)


def test_session_meets_the_bound_and_files_pass_between_its_cells() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    session = await box.session(limits=LIMITS)
    await session.run("open('mine', 'w').write('of the cell')")
    assert await box.download("mine") == b"of the cell"
    await box.upload("given", b"of the host")
    assert (await session.run("open('given').read()")).stdout == "'of the host'\n"
    filled = int((await session.run(FILL)).stdout.split()[0])
    assert LIMITS.disk_bytes - 3 * 4096 <= filled <= LIMITS.disk_bytes

  with_box(body)


def test_memory_of_a_disk_is_free_when_its_box_is_closed() -> None:
  def shared() -> int:
    with open("/proc/meminfo") as file:
      return next(int(line.split()[1]) for line in file if line.startswith("Shmem:")) * 1024

  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    large = SandboxLimits(disk_bytes=256 * MEBIBYTE, file_bytes=256 * MEBIBYTE)
    before = shared()
    await printed(box, "open('x', 'wb').write(bytes(2**27)); open('y', 'wb').write(bytes(2**26))",
                  limits=large)  # fmt: skip
    await box.download("y", max_bytes=2**27)
    # Watchers that are forked while the box is open must not hold it either.
    await asyncio.gather(*(run_once(sandbox, PythonScript("1")) for _ in range(6)))
    assert shared() > before + 160 * MEBIBYTE
    await box.close()
    for _ in range(100):
      if shared() < before + 32 * MEBIBYTE:
        return
      await asyncio.sleep(0.05)
    raise AssertionError(f"{shared() - before} bytes are still held")

  with_box(body)


def test_keeper_holds_nothing_for_those_who_are_gone() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    assert sandbox._zygote is not None
    keeper = children(sandbox._zygote._process.pid)[0]
    await box.upload("x", b"1")
    before = len(os.listdir(f"/proc/{keeper}/fd"))
    for _ in range(50):
      os.kill(keeper, signal.SIGSTOP)
      os.close(box._files.begin(LIMITS, {}))
      os.kill(keeper, signal.SIGCONT)
    assert await box.download("x") == b"1"
    await printed(box, "1")
    for _ in range(100):  # it closes its copy of a mount after the run that got it may have ended
      if len(os.listdir(f"/proc/{keeper}/fd")) <= before:
        return
      await asyncio.sleep(0.05)
    raise AssertionError(f"{os.listdir(f'/proc/{keeper}/fd')} are open, {before} were before")

  with_box(body)


def test_killed_keeper_is_an_infrastructure_error_until_it_is_replaced() -> None:
  async def body(sandbox: ProcessSandbox, box: ProcessBox) -> None:
    assert sandbox._zygote is not None
    await box.upload("x", b"1")
    os.kill(children(sandbox._zygote._process.pid)[0], signal.SIGKILL)
    statuses = set()
    for _ in range(200):
      statuses.add(status := (await run_once(sandbox, PythonScript("1"), limits=LIMITS)).status)
      if status is RunStatus.OK:
        break
      await asyncio.sleep(0.1)
    assert RunStatus.OK in statuses <= {RunStatus.OK, RunStatus.INFRA_ERROR}
    lost = await box.exec(PythonScript("1"), limits=LIMITS)
    assert lost.status is RunStatus.INFRA_ERROR

  with_box(body)


@pytest.mark.parametrize("machine", MACHINES)
def test_machine_says_which_way_the_disk_is_bounded(machine: str) -> None:
  try:
    memory, directory = Machine(machine), Machine(machine, {"disk": "directory"})
  except NoMachine as reason:
    pytest.skip(str(reason))
  ways = {"disk_in_memory", "disk_by_looking"}
  own_files = memory.grants("own_file_system")
  assert own_files is not machine.endswith(("container", "old_kernel"))
  found = ways & set(memory.hello["mechanisms"])
  assert found == {"disk_in_memory" if own_files else "disk_by_looking"}
  assert ways & set(directory.hello["mechanisms"]) == {"disk_by_looking"}
  result = directory.run("import time\nopen('x', 'wb').write(bytes(2**22))\ntime.sleep(4)",
                         disk_bytes=2**21)  # fmt: skip
  assert (result["status"], result["detail"]) == (
    "killed",
    "its files hold more than 2097152 bytes",
  )
  memory.close()
  directory.close()


def test_snapshot_never_leads_out_of_the_box(tmp_path: Any) -> None:
  outside = tmp_path / "outside"
  outside.mkdir()

  def snapshot(*entries: tuple[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
      for name, content in entries:
        entry = tarfile.TarInfo(name)
        if isinstance(content, str):
          entry.type, entry.linkname = tarfile.SYMTYPE, content
          tar.addfile(entry)
        else:
          entry.size = len(content)
          tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()

  async def body(sandbox: ProcessSandbox) -> None:
    for bad in (
      snapshot(("../x", b"1")),
      snapshot(("/x", b"1")),
      snapshot(("link", str(outside)), ("link/x", b"1")),
      snapshot(("link", "../" * 30 + str(outside)[1:]), ("link/x", b"1")),
      snapshot(("d/up", ".."), ("d/up/x", b"1")),
      snapshot(("f", b"1"), ("f", b"2")),
      b"no tar",
    ):
      with pytest.raises(BoxContentError):
        await sandbox.create(bad)
    assert os.listdir(outside) == []
    box = await sandbox.create(snapshot(("link", str(outside)), ("d/f", b"1")))
    assert await box.download("d/f") == b"1"
    with pytest.raises(SandboxError):
      await box.upload("link/x", b"1")
    assert os.listdir(outside) == []

  use(body)
  use(body, disk="directory")
