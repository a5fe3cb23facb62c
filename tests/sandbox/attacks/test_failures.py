"""How sandboxes are known to fail, on machines that grant everything down to almost nothing.

Each way has its test; where the table of attacks covers it, the row stands here.

   1 daemons outlive a killed process group     row "daemon"
   2 a daemon's pipe keeps the caller waiting   row "held pipe"
   3 zombies use up the process table           row "zombies", test_orphans_of_many_runs…
   4 root has no process limit                  row "fork bomb", test_program_owns_nothing…
   5 a signal to all reaches the trainer        row "kills"
   6 memory is bounded a process, not a run     rows "memory bomb of many", "memory of nobody"
   7 Landlock knows TCP only                    rows "network", "other sockets"
   8 system call tables, clone3, x32            row "other system call tables", test_jail
   9 /etc readable, interpreter unreadable      row "reads files", test_program_owns_nothing…
  10 output lost at a time-out                  test_endless_loop…, test_memory_limit_is_said…
  11 no namespaces in a container               machines "container", "user_container"
  12 a fork of a process with threads           test_process: test_this_process_is_never_forked
  13 one watcher, one run                       test_process: test_many_runs_at_once…
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.sandbox.process_table import alive, descendants, pids


def _parent(pid: int) -> int:
  with open(f"/proc/{pid}/stat") as file:
    return int(file.read().rpartition(")")[2].split()[1])


def _marker() -> str:
  return f"{uuid.uuid4().int % 10**9 + 10**9}"  # seconds for `sleep`, long enough to be seen


def _wait_for(condition: Callable[[], bool]) -> None:
  deadline = time.monotonic() + 10.0
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_probed_protections_never_miss_the_essential_ones(machine: Any) -> None:
  assert {"limits", "descendants", "network"} <= set(machine.hello["protections"])
  # Without namespaces, Landlock and a user of its own nothing guards the trainer's memory.
  if not (machine.name.endswith("old_kernel") and not machine.grants("user")):
    assert machine.grants("processes")


def test_endless_loop_ends_at_the_wall_clock_and_keeps_what_it_printed(machine: Any) -> None:
  result = machine.run("print('before')\nwhile True: pass", wall_seconds=0.5)
  assert result["status"] == "timeout"
  assert result["stdout"] == "before\n"
  assert 0.5 <= result["seconds"] < 5.0


def test_memory_limit_is_said_with_what_was_printed(machine: Any) -> None:
  result = machine.run("print('before')\nx = bytearray(10**9)", memory_bytes=2**26)
  assert (result["status"], result["stdout"]) == ("memory_limit", "before\n")
  assert "67108864 bytes of memory" in result["detail"]


def test_orphans_of_many_runs_do_not_pile_up(machine: Any) -> None:
  code = "import os\nfor _ in range(8):\n  if os.fork() == 0: os._exit(0)"
  for _ in range(5):
    assert machine.run(code, processes=12)["status"] == "ok"
  # Interpreter, and three processes for each that stands by or has just ended.
  assert len(descendants(machine.process.pid)) <= 1 + 4 * 3 + 3


def test_program_owns_nothing_and_still_finds_its_interpreter(machine: Any) -> None:
  code = (
    "import json, os, sqlite3, sys\nprint(os.getuid(), os.getgroups(), open(os.__file__).read(9))"
  )
  result = machine.run(code)
  assert result["status"] == "ok", result
  uid, groups = result["stdout"].split(" ", 2)[:2]
  if machine.grants("user"):
    assert int(uid) >= 61000
    assert groups == "[]"
  else:
    assert machine.name != "native" or os.geteuid() != 0


def test_nothing_is_inherited(machine: Any) -> None:
  code = """
import os, sys
print(sorted(os.environ))
def is_open(fd):
  try:
    os.fstat(fd)
    return True
  except OSError:
    return False
print([fd for fd in range(300) if is_open(fd)])
print(sys.stdin.read() == "")
"""
  names, fds, at_end = machine.run(code)["stdout"].splitlines()
  assert set(json.loads(names.replace("'", '"'))) <= {
      "HOME", "LANG", "LC_CTYPE", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
      "PATH", "PWD", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR",
  }  # fmt: skip
  assert fds == "[0, 1, 2]"
  assert at_end == "True"
  shell = machine.command("sh", "-c", "env; cat")
  assert shell["status"] == "ok"
  assert "secret" not in shell["stdout"]


def test_crash_is_reported_as_a_signal(machine: Any) -> None:
  result = machine.run("import ctypes\nctypes.string_at(0)")
  assert result["status"] == "killed"
  assert result["exit_code"] == -11


@pytest.mark.parametrize("name", ["native", "container", "user_container"])
def test_watcher_that_dies_masks_its_run_and_leaves_no_process(
  start_machine: Any, name: str
) -> None:
  marker = _marker()
  machine = start_machine(name)
  daemon = f"""
import os
if os.fork() == 0:
  os.setsid()
  os.execvp("sleep", ["sleep", "{marker}"])
os.wait()
"""
  machine.send({"runs": [{"code": daemon}]})
  _wait_for(lambda: alive(f"sleep\0{marker}"))
  watcher = pids(f"sleep\0{marker}")[0]
  while _parent(_parent(watcher)) != machine.process.pid:
    watcher = _parent(watcher)
  os.kill(watcher, signal.SIGKILL)
  assert machine.read()[0]["status"] == "infra_error"
  _wait_for(lambda: not alive(f"sleep\0{marker}"))
  assert machine.run("'next'")["stdout"] == "'next'\n"
  machine.close()


def test_run_does_not_outlive_a_trainer_that_is_killed(start_machine: Any, tmp_path: Any) -> None:
  marker = _marker()
  machine = start_machine("native", {"directory": str(tmp_path)})
  machine.send({"runs": [{"argv": ["sleep", marker]}]})
  _wait_for(lambda: alive(f"sleep\0{marker}"))
  machine.process.kill()
  _wait_for(lambda: not alive(f"sleep\0{marker}"))
  machine.close()


def test_missing_required_protection_refuses_to_start(start_machine: Any) -> None:
  machine = start_machine("user_old_kernel", {"allow_unisolated": False})
  assert "processes, filesystem" in machine.hello["error"]
  assert "ProcessSandboxConfig.allow_unisolated" in machine.hello["error"]
  machine.close()
