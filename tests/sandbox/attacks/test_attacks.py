"""What a hostile program cannot do, on machines that grant everything down to almost nothing."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.sandbox.process_table import alive, pids


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


def _needs(machine: Any, protection: str) -> None:
  if not machine.grants(protection):
    pytest.skip(f"machine {machine.name} does not grant {protection}, and says so")


def test_probed_protections_never_miss_the_essential_ones(machine: Any) -> None:
  assert {"limits", "descendants", "network"} <= set(machine.hello)
  # Without namespaces, Landlock and a user of its own nothing guards the trainer's memory.
  if not (machine.name.endswith("old_kernel") and not machine.grants("user")):
    assert machine.grants("processes")


def test_endless_loop_ends_at_the_wall_clock_and_keeps_what_it_printed(machine: Any) -> None:
  result = machine.run("print('before')\nwhile True: pass", wall_seconds=0.5)
  assert result["status"] == "timeout"
  assert result["stdout"] == "before\n"
  assert 0.5 <= result["seconds"] < 5.0


def test_program_that_ignores_signals_or_stops_itself_still_ends(machine: Any) -> None:
  ignoring = """
import signal, time
for number in (1, 2, 3, 15):
  signal.signal(number, signal.SIG_IGN)
time.sleep(60)
"""
  stopping = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
  assert machine.run(ignoring, wall_seconds=0.3)["status"] == "timeout"
  assert machine.run(stopping, wall_seconds=0.3)["status"] == "timeout"


def test_endless_output_is_cut_off_with_head_and_tail_kept(machine: Any) -> None:
  result = machine.run(
      "i = 0\nwhile True:\n  print(i)\n  i += 1",
      output_bytes=1000, output_kill_bytes=100_000,
  )  # fmt: skip
  assert result["status"] == "output_limit"
  assert result["truncated"]
  assert result["stdout"].startswith("0\n1\n2\n")
  assert "bytes left out" in result["stdout"]
  assert len(result["stdout"]) < 1100


def test_double_forked_daemon_dies_with_its_run_and_does_not_delay_it(machine: Any) -> None:
  marker = _marker()
  code = f"""
import os, signal, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execvp("sleep", ["sleep", "{marker}"])  # still holds stdout
  os._exit(0)
os.wait()
time.sleep(0.1)
print("done")
"""
  result = machine.run(code, wall_seconds=20.0)
  assert result["status"] == "ok"
  assert result["stdout"] == "done\n"
  assert result["seconds"] < 10.0
  assert not alive(marker)


def test_fork_bomb_is_bounded_swept_and_leaves_the_next_run_unharmed(machine: Any) -> None:
  marker = _marker()
  code = f"""
import os, sys
sys.argv = ["{marker}"]
while True:
  try:
    os.fork()
  except OSError:
    pass
"""
  result = machine.run(code, wall_seconds=1.0, processes=16)
  assert result["status"] in ("timeout", "killed")
  assert machine.run("1 + 1")["stdout"] == "2\n"


def test_orphans_of_many_runs_do_not_pile_up(machine: Any) -> None:
  code = "import os\nfor _ in range(8):\n  if os.fork() == 0: os._exit(0)"
  for _ in range(5):
    assert machine.run(code, processes=12)["status"] == "ok"
  descendants, found = [machine.process.pid], 0
  for pid in descendants:
    for task in os.listdir(f"/proc/{pid}/task"):
      with open(f"/proc/{pid}/task/{task}/children") as file:
        descendants += [int(p) for p in file.read().split()]
    found += 1
  assert found <= 2 + 4 * 3 + 3  # driver, interpreter, three processes for each stand-by


def test_memory_of_one_process_is_bounded(machine: Any) -> None:
  result = machine.run("x = bytearray(10**9)", memory_bytes=2**26)
  assert result["status"] == "memory_limit"
  assert "MemoryError" in result["stderr"]


def test_memory_of_many_processes_together_is_bounded(machine: Any) -> None:
  code = """
import os, time
for _ in range(6):
  if os.fork() == 0:
    x = b"x" * (40 * 2**20)
    time.sleep(20)
time.sleep(20)
"""
  result = machine.run(code, memory_bytes=2**27, wall_seconds=15.0)
  assert result["status"] == "memory_limit"
  assert result["seconds"] < 14.0


def test_big_file_is_refused(machine: Any) -> None:
  code = "with open('big', 'wb') as f:\n  f.write(bytes(2**20))"
  assert machine.run(code, file_bytes=2**20)["status"] == "ok"
  result = machine.run(code, file_bytes=2**20 - 1)
  assert result["status"] == "error"
  assert "File too large" in result["stderr"]


def test_no_connection_leaves_the_box(machine: Any, tmp_path: Any) -> None:
  os.chmod(tmp_path, 0o777)
  name = uuid.uuid4().hex
  listeners = []
  for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
    (socket.AF_UNIX, socket.SOCK_STREAM, f"/tmp/{name}"),
    (socket.AF_UNIX, socket.SOCK_DGRAM, "\0" + name),
  ):
    listener = socket.socket(family, kind)
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
      listener.listen()
    listener.setblocking(False)
    listeners.append(listener)
  os.chmod(f"/tmp/{name}", 0o777)
  targets = [(l.family, l.type, l.getsockname()) for l in listeners]
  targets[3] = (*targets[3][:2], "\0" + name)
  code = f"""
import socket
for family, kind, address in {json.dumps(targets)}:
  try:
    s = socket.socket(family, kind)
    s.settimeout(1.0)
    s.connect(tuple(address) if isinstance(address, list) else address)
    s.send(b"x")
    print("reached", address)
  except OSError as error:
    print("refused")
try:
  socket.getaddrinfo("example.com", 80)
  print("resolved")
except OSError:
  print("refused")
"""
  result = machine.run(code)
  os.unlink(f"/tmp/{name}")
  assert result["stdout"] == "refused\n" * 5, result
  for listener in listeners:
    with pytest.raises(BlockingIOError):
      listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1)
    listener.close()


def test_no_signal_reaches_the_trainer(machine: Any) -> None:
  trainer = machine.process.pid
  code = f"""
import os, signal, ctypes, fcntl
for target in ({trainer}, os.getppid(), -1):
  for number in (signal.SIGKILL, signal.SIGSTOP):
    try:
      os.kill(target, number)
    except OSError:
      pass
try:
  signal.pidfd_send_signal(os.pidfd_open({trainer}), signal.SIGKILL)
except OSError:
  pass
libc = ctypes.CDLL(None)
libc.tgkill({trainer}, {trainer}, 9)
r, w = os.pipe()
try:
  fcntl.fcntl(r, fcntl.F_SETOWN, {trainer})
  fcntl.fcntl(r, fcntl.F_SETSIG, 9)
  fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
  os.write(w, b"x")
except OSError:
  pass
print("tried")
"""
  result = machine.run(code)
  assert result["status"] in ("ok", "killed"), result
  time.sleep(0.05)
  assert machine.process.poll() is None
  assert machine.run("2 + 2", wall_seconds=5.0)["stdout"] == "4\n"


def test_limits_and_priority_of_the_trainer_cannot_be_changed(machine: Any) -> None:
  trainer = machine.process.pid
  code = f"""
import os, resource
for attempt in (
  lambda: resource.prlimit({trainer}, resource.RLIMIT_CPU, (1, 1)),
  lambda: os.setpriority(os.PRIO_PROCESS, {trainer}, 19),
  lambda: os.sched_setaffinity({trainer}, {{0}}),
):
  try:
    attempt()
    print("changed")
  except OSError:
    print("refused")
"""
  assert machine.run(code)["stdout"] == "refused\n" * 3


def test_memory_and_environment_of_the_trainer_cannot_be_read(machine: Any) -> None:
  _needs(machine, "processes")
  trainer = machine.process.pid
  code = f"""
import glob
for pid in ({trainer}, "1", *[p.split("/")[2] for p in glob.glob("/proc/[0-9]*/")]):
  for name in ("environ", "mem", "maps", "fd/0"):
    try:
      with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
        print(pid, name, file.read(100000))
    except (OSError, ValueError):
      pass
"""
  assert "secret-of-the-trainer" not in machine.run(code, output_bytes=2**22)["stdout"]


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


def test_files_outside_are_out_of_reach(machine: Any) -> None:
  _needs(machine, "filesystem")
  secret = pathlib.Path("/tmp", _marker())
  secret.write_text("hidden")
  if os.geteuid() == 0 and machine.name.startswith("user"):
    os.chown(secret, 65534, 65534)  # the trainer's own file
  code = f"""
import os
for attempt in (
  lambda: open("/etc/passwd").read(),
  lambda: open({str(secret)!r}).read(),
  lambda: open({str(secret)!r}, "w"),
  lambda: os.truncate({str(secret)!r}, 0),
  lambda: os.open({str(secret)!r}, os.O_RDONLY | os.O_TRUNC),
  lambda: os.chmod({str(secret)!r}, 0),
  lambda: os.setxattr({str(secret)!r}, "user.a", b"x"),
  lambda: os.unlink({str(secret)!r}),
  lambda: os.rename({str(secret)!r}, "stolen"),
  lambda: open("/tmp/new-{_marker()}", "w"),
  lambda: os.link({str(secret)!r}, "stolen"),
  lambda: (os.symlink({str(secret)!r}, "link"), open("link").read()),
  lambda: os.listdir("/proc"),
  lambda: os.listdir(".."),
):
  try:
    attempt()
    print("reached")
  except OSError:
    print("refused")
open("mine", "w").write("allowed")
print(open("mine").read())
"""
  result = machine.run(code)
  assert secret.read_text() == "hidden"
  assert secret.stat().st_mode & 0o777 == 0o644
  secret.unlink()
  assert result["stdout"] == "refused\n" * 14 + "allowed\n", result


def test_kernel_interfaces_are_refused(machine: Any) -> None:
  _needs(machine, "syscalls")
  code = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
for name, number in (
  ("ptrace", 101 if x86 else 117), ("unshare", 272 if x86 else 97), ("bpf", 321 if x86 else 280),
  ("io_uring_setup", 425), ("keyctl", 250 if x86 else 219), ("userfaultfd", 323 if x86 else 282),
  ("mount", 165 if x86 else 40), ("process_vm_readv", 310 if x86 else 270),
):
  ctypes.set_errno(0)
  result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
  if (result, ctypes.get_errno()) != (-1, errno.EPERM):
    print(name, result, ctypes.get_errno())
flags = 0x10000000 | 17  # a new user namespace
if libc.syscall(56 if x86 else 220, flags, 0, 0, 0, 0) != -1:
  print("clone")
if libc.syscall(435, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
  print("clone3")
"""
  assert machine.run(code)["stdout"] == ""


def test_no_capability_is_left_and_none_can_be_gained(machine: Any) -> None:
  code = """
import ctypes
libc = ctypes.CDLL(None)
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
print(any(data), libc.prctl(39, 0, 0, 0, 0))  # 39: PR_GET_NO_NEW_PRIVS
"""
  assert machine.run(code)["stdout"] == "False 1\n"


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
  machine.process.stdin.write(json.dumps({"code": daemon}) + "\n")
  machine.process.stdin.flush()
  _wait_for(lambda: alive(f"sleep\0{marker}"))
  watcher = pids(f"sleep\0{marker}")[0]
  while _parent(_parent(watcher)) != machine.process.pid:
    watcher = _parent(watcher)
  os.kill(watcher, signal.SIGKILL)
  assert machine.read()["status"] == "infra_error"
  _wait_for(lambda: not alive(f"sleep\0{marker}"))
  assert machine.run("'next'")["stdout"] == "'next'\n"
  machine.close()


def test_run_does_not_outlive_a_trainer_that_is_killed(start_machine: Any, tmp_path: Any) -> None:
  marker = _marker()
  machine = start_machine("native", {"directory": str(tmp_path)})
  machine.process.stdin.write(json.dumps({"argv": ["sleep", marker]}) + "\n")
  machine.process.stdin.flush()
  _wait_for(lambda: alive(f"sleep\0{marker}"))
  machine.process.kill()
  _wait_for(lambda: not alive(f"sleep\0{marker}"))
  machine.close()


def test_missing_required_protection_refuses_to_start(start_machine: Any) -> None:
  machine = start_machine("user_old_kernel", {"require": ["limits", "filesystem", "processes"]})
  assert "filesystem, processes" in machine.hello["error"]
  assert "ProcessSandboxConfig.allow_unisolated" in machine.hello["error"]
  machine.close()
