"""Interpreter sessions: what lasts from cell to cell, what ends with a cell, what ends it all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentjax.sandbox import (
  ProcessSandbox,
  ProcessSandboxConfig,
  PythonCell,
  RunStatus,
  SandboxError,
  SandboxLimits,
  Session,
)
from tests.sandbox.process_table import alive, descendants

LIMITS = SandboxLimits(wall_seconds=5.0, memory_bytes=2**27)


def use(
  body: Callable[[ProcessSandbox, Any, Session], Coroutine[Any, Any, Any]],
  limits: SandboxLimits = LIMITS,
  **settings: Any,
) -> Any:
  """Runs ``body`` with a sandbox, a box and a session in it."""

  async def main() -> Any:
    sandbox = ProcessSandbox(ProcessSandboxConfig(**{"concurrency": 2, **settings}))
    try:
      box = await sandbox.create()
      return await body(sandbox, box, await box.session(limits=limits))
    finally:
      await sandbox.close()

  return asyncio.run(main())


def _pid(sandbox: ProcessSandbox) -> int:
  assert sandbox._zygote is not None
  return sandbox._zygote._process.pid


def test_names_imports_and_files_last_and_errors_do_not_end_the_session() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    assert not session.alive
    assert (await session.run("import math\nx = 3\nprint('a')\nx")).stdout == "a\n3\n"
    assert session.alive
    failed = await session.run("def f():\n  return x / 0\nx = 4\nf()")
    assert (failed.status, failed.exit_code) == (RunStatus.ERROR, 1)
    assert "return x / 0" in failed.stderr
    assert "zygote" not in failed.stderr
    left = await session.run("import sys\nsys.exit(3)")
    assert (left.status, left.exit_code) == (RunStatus.ERROR, 3)
    assert (await session.run("f.__name__, math.sqrt(x)")).stdout == "('f', 2.0)\n"
    assert (await session.run("'\\0'[")).status is RunStatus.ERROR
    later = await session.run("f()")  # a function of an earlier cell keeps its source
    assert "return x / 0" in later.stderr
    await box.upload("in", b"uploaded")
    assert (await session.run("open('out', 'w').write(open('in').read())")).stdout == "8\n"
    assert await box.download("out") == b"uploaded"
    with pytest.raises(SandboxError, match="session is open"):
      await box.exec(PythonCell("1"))
    with pytest.raises(SandboxError, match="session is open"):
      await box.session()
    with pytest.raises(SandboxError, match="in no snapshot"):
      await box.snapshot()

  use(body)


def test_each_cell_has_its_own_output_seed_and_clock() -> None:
  limits = SandboxLimits(wall_seconds=0.6, output_bytes=100)

  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    long = await session.run("print('x' * 1000)")
    assert long.truncated
    assert (await session.run("'short'")).truncated is False
    draws = [await session.run("import random\nrandom.random()", seed=s) for s in (1, 1, 2)]
    assert draws[0].stdout == draws[1].stdout != draws[2].stdout
    for _ in range(3):
      assert (await session.run("import time\ntime.sleep(0.3)")).status is RunStatus.OK
    assert (await session.run("time.sleep(9)", wall_seconds=0.1)).seconds < 0.5

  use(body, limits)


@pytest.mark.parametrize(
  ("cell", "status"),
  [
    ("while True: pass", RunStatus.TIMEOUT),
    ("import os\nos._exit(0)", RunStatus.OK),
    ("import os\nos.abort()", RunStatus.KILLED),
    ("while True: print('x' * 1000)", RunStatus.OUTPUT_LIMIT),
    ("import os\n[os.fork() for _ in range(3)]\nx = b'x' * 40_000_000\nimport time\ntime.sleep(9)",
     RunStatus.MEMORY_LIMIT),
  ],
)  # fmt: skip
def test_cell_that_takes_the_interpreter_with_it_says_so_and_the_next_is_fresh(
  cell: str, status: RunStatus
) -> None:
  limits = SandboxLimits(wall_seconds=1.5, memory_bytes=2**27, output_kill_bytes=2**20)

  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    first = await session.run("x = 1\nopen('kept', 'w').write('kept')")
    ending = await session.run(cell)
    assert ending.status is status, ending
    assert not session.alive
    fresh = await session.run("'x' in globals(), open('kept').read()")
    assert fresh.stdout == "(False, 'kept')\n"
    assert [r.restarted for r in (first, ending, fresh)] == [False, False, True]
    assert (await session.run("1")).restarted is False

  use(body, limits)


def test_memory_of_earlier_cells_counts() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    assert (await session.run("x = bytearray(80 * 2**20)")).status is RunStatus.OK
    more = await session.run("y = bytearray(80 * 2**20)")
    assert more.status is RunStatus.MEMORY_LIMIT
    assert session.alive  # Python refused it, so the names are still there
    assert (await session.run("len(x)")).stdout == f"{80 * 2**20}\n"
    await session.run("del x")
    assert (await session.run("y = bytearray(80 * 2**20)")).status is RunStatus.OK

  use(body)


def test_cpu_time_is_counted_for_each_cell() -> None:
  limits = SandboxLimits(wall_seconds=20.0, cpu_seconds=0.4)
  spin = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass"

  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    for _ in range(3):
      assert (await session.run(spin)).status is RunStatus.OK
    children = "import os\nfor _ in range(2): os.fork()\nwhile True: pass"
    over = await session.run(children)
    assert over.status is RunStatus.TIMEOUT
    assert "CPU" in over.detail
    assert over.seconds < 10.0

  use(body, limits)


def test_between_cells_nothing_runs_and_what_cells_started_is_dead() -> None:
  marker = f"{uuid.uuid4().int % 10**9 + 10**9}"
  background = f"""
import os, subprocess, threading, time
count = 0
def work():
  global count
  while True:
    count += 1
    time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
subprocess.Popen(["sleep", "{marker}"])
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    os.execvp("sleep", ["sleep", "{marker}"])
  os._exit(0)
time.sleep(0.2)
"""

  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    assert (await session.run(background)).status is RunStatus.OK
    assert not alive(f"sleep\0{marker}")
    first = int((await session.run("count")).stdout)
    await asyncio.sleep(0.3)
    assert int((await session.run("count")).stdout) < first + 100

  use(body)


def test_child_forked_by_a_cell_does_not_end_it() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    forked = (
      "import os, time\npid = os.fork()\nif pid: time.sleep(0.2)\nprint('parent' if pid else '')"
    )
    assert "parent" in (await session.run(forked)).stdout
    assert (await session.run("pid > 0")).stdout == "True\n"

  use(body)


def test_interpreter_lost_between_cells_is_replaced_without_an_error() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    await session.run("x = 1")
    stopped = [p for p in descendants(_pid(sandbox)) if _state(p) == "T"]
    assert len(stopped) == 1
    os.kill(stopped[0], signal.SIGKILL)  # as the kernel does when memory runs out
    await asyncio.sleep(0.05)
    result = await session.run("'x' in globals()")
    assert (result.status, result.stdout, result.restarted) == (RunStatus.OK, "False\n", True)

  use(body)


def test_cancelled_cell_ends_the_interpreter() -> None:
  marker = f"{uuid.uuid4().int % 10**9 + 10**9}"

  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    task = asyncio.create_task(session.run(f"import os\nos.system('exec sleep {marker}')"))
    while not alive(f"sleep\0{marker}"):
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert not alive(f"sleep\0{marker}")
    assert (await session.run("1")).restarted

  use(body)


def test_closing_leaves_nothing_alive() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    await session.run("1")
    running = asyncio.create_task(session.run("while True: pass"))
    await asyncio.sleep(0.2)
    await session.close()
    await session.close()
    assert (await running).status is RunStatus.KILLED
    with pytest.raises(SandboxError, match="closed"):
      await session.run("1")
    assert not any(_state(p) == "T" for p in descendants(_pid(sandbox)))
    again = await box.session(limits=LIMITS)  # the box is free for another, or for programs
    assert (await again.run("2")).stdout == "2\n"
    await box.close()
    assert not sandbox.boxes
    with pytest.raises(SandboxError, match="closed"):
      await again.run("1")

  use(body)


def test_idle_sessions_hold_no_place_among_the_runs() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    await session.run("x = 0")
    boxes = [await sandbox.create() for _ in range(4)]
    sessions = [await b.session(limits=LIMITS) for b in boxes]
    for n, each in enumerate(sessions):
      await each.run(f"x = {n}")
    results = await asyncio.gather(*(each.run("x") for each in sessions))
    assert [r.stdout for r in results] == ["0\n", "1\n", "2\n", "3\n"]

  use(body, concurrency=1)


def _state(pid: int) -> str:
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0]
  except OSError:
    return "X"


_FORGE = """
import os, socket, stat
def is_socket(fd):
  try: return stat.S_ISSOCK(os.fstat(fd).st_mode)
  except OSError: return False
channel = next(fd for fd in range(3, 64) if is_socket(fd))
{before}
os.write(channel, b"\\0")
{after}
while True: signal.pause()
"""
_UNREAD = "'unread'" + " " * 500_000  # more than a socket holds


def _forge(before: str = "", after: str = "import signal") -> str:
  """A cell that says it is over, and is not."""
  return _FORGE.format(before=before, after=after)


def test_cell_that_says_it_is_over_cannot_make_its_watcher_wait() -> None:
  async def body(sandbox: ProcessSandbox, box: Any, session: Session) -> None:
    forged = await session.run(_forge())
    assert (forged.status, session.alive) == (RunStatus.OK, True), forged  # as if it were over
    unread = await session.run(_UNREAD, wall_seconds=0.5)
    assert unread.status is RunStatus.TIMEOUT, unread
    assert unread.seconds < 3.0
    assert (await session.run("1 + 1")).stdout == "2\n"
    # Now it also speaks while the next cell is still being sent.
    await session.run(_forge(after="import signal, time\ntime.sleep(0.5)\nos.write(channel, b'0')"))
    early = await session.run(_UNREAD)
    assert early.status is RunStatus.KILLED, early
    assert (await session.run("1 + 1")).stdout == "2\n"

  use(body)


@pytest.mark.parametrize("name", ["native", pytest.param("container", marks=pytest.mark.slow)])
def test_session_with_an_unread_cell_ends_with_its_trainer(start_machine: Any, name: str) -> None:
  machine = start_machine(name)
  limits = {"wall_seconds": 90.0}
  machine.ask({"runs": [{"code": _forge(), "cell": True, "limits": limits}]})
  machine.send({"runs": [{"code": _UNREAD, "cell": True, "limits": limits}]})
  time.sleep(1.0)
  family = descendants(machine.process.pid)
  assert family
  machine.process.kill()
  deadline = time.monotonic() + 10.0
  while any(os.path.exists(f"/proc/{pid}") for pid in family):
    assert time.monotonic() < deadline
    time.sleep(0.05)
  machine.close()
