"""The sandbox's own interpreter: forks one watcher a run, which jails, times and ends the program.

Started as ``python -P -s -S`` with a scrubbed environment, never forked from the process that
trains; imports the standard library only. File descriptor 0 is the control socket: each message on
it carries the socket of one run. On that the host sends a request (frames, see ``receive``), the
watcher answers with one result, and the host closing it ends the run: none outlives its caller.

    host ── control ──► zygote ── fork ──► watcher ── fork ──► [init, pid 1 ──►] program
"""

from __future__ import annotations

import array
import ast
import builtins
import contextlib
import functools
import gc
import importlib
import io
import json
import linecache
import os
import random
import re
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
import traceback
import types
from typing import Any

from agentjax.sandbox import jail

# What snippets import most; loaded once here, so that a run finds them ready.
_COMMON = (
  "atexit bisect collections copy csv dataclasses datetime decimal enum fractions functools "
  "heapq io itertools json math operator random re statistics string textwrap threading time "
  "typing"
).split()
_READABLE = (
  "/usr",
  "/bin",
  "/sbin",
  "/lib",
  "/lib32",
  "/lib64",
  "/etc/ld.so.cache",
  "/etc/localtime",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_TICK = 0.02  # seconds between looks at memory and process counts of a run
_LEAVE_SECONDS = 4.0  # for the watchers to end after the host has gone
_MAX_FRAME = 1 << 30
_HAS_CHILDREN_FILE = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def receive(connection: socket.socket) -> bytes:
  """One frame: its length as 8 bytes, then its bytes. Raises EOFError when the peer is gone."""
  header = _receive_exactly(connection, 8)
  length = struct.unpack("<Q", header)[0]
  if length > _MAX_FRAME:
    raise EOFError
  return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
  parts = bytearray()
  while len(parts) < count:
    part = connection.recv(min(count - len(parts), 1 << 20))
    if not part:
      raise EOFError
    parts += part
  return bytes(parts)


class Walls:
  """Which walls this machine grants, found by trying each; ``settings`` come from the host."""

  def __init__(self, settings: dict[str, Any]):
    self.readable = [*_READABLE, *settings["readable"]]
    inner = jail.CLONE_NEWNET | jail.CLONE_NEWIPC | jail.CLONE_NEWUTS | jail.CLONE_NEWNS
    self.privileged = jail.holds(lambda: _enter_as_root(inner, settings))
    self.first_uid, self.uids = _spare_uids()
    if not (self.uids and jail.holds(lambda: self._change_user(settings, inner))):
      self.uids = 0
    # Another user's id and a user namespace of ours exclude each other; the id also guards files.
    self.user_namespace = (
      not self.privileged and not self.uids and jail.holds(lambda: _enter_as_user(inner))
    )
    if self.privileged:
      _enter_as_root(inner, settings if self.uids else None)
    elif self.user_namespace:
      _enter_as_user(inner)
    freeze = functools.partial(jail.freeze_files, settings["directory"])
    self.frozen = (self.privileged or self.user_namespace) and jail.holds(freeze)
    if self.frozen:
      freeze()
    self.pid_namespace = (self.privileged or self.user_namespace) and jail.holds(self.isolate_pids)
    self.landlock = jail.landlock_version() if jail.holds(self._try_landlock) else 0
    self.seccomp = jail.seccomp_known() and jail.holds(self._try_seccomp)
    release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    # Before Linux 5.14 a user namespace did not count its processes apart.
    self.counts_apart = self.user_namespace and self.pid_namespace and release >= (5, 14)

  def isolate_pids(self) -> None:
    if self.user_namespace:
      jail.unshare_as_user(jail.CLONE_NEWPID)
    else:
      jail.unshare(jail.CLONE_NEWPID)

  def _change_user(self, settings: dict[str, Any], inner: int) -> None:
    if self.privileged:
      _enter_as_root(inner, settings)
    jail.become(self.first_uid)
    os.stat(os.path.join(settings["directory"], "."))
    for path in settings["readable"]:
      os.listdir(path)
    with open(os.__file__):
      pass

  def _try_landlock(self) -> None:
    if jail.landlock_version() == 0:
      raise OSError
    jail.no_new_privileges()
    jail.restrict_files(self.readable, _DEVICES, "/tmp")

  def _try_seccomp(self) -> None:
    jail.no_new_privileges()
    self.refuse_system_calls()

  def refuse_system_calls(self) -> None:
    jail.refuse_system_calls(
      own_pid_namespace=self.pid_namespace, files_guarded=bool(self.frozen or self.uids)
    )

  def protections(self) -> list[str]:
    names = ["limits", "descendants"]
    if self.seccomp:  # a network namespace alone would leave unix sockets in the file system
      names.append("network")
    signals = self.pid_namespace or self.uids or self.landlock >= 6 or self.seccomp
    apart = self.user_namespace and self.pid_namespace
    if signals and (apart or self.uids or self.landlock):
      names.append("processes")
    # Landlock before version 3 lets a file be truncated; a change of its mode it always lets pass.
    if self.landlock and (self.frozen or self.uids or (self.landlock >= 3 and self.seccomp)):
      names.append("filesystem")
    if self.seccomp:
      names.append("syscalls")
    if self.uids:
      names.append("user")
    return names

  def mechanisms(self) -> list[str]:
    found = {
      "namespaces": self.privileged or self.user_namespace,
      "read_only_mounts": self.frozen,
      "pid_namespace": self.pid_namespace,
      f"landlock_{self.landlock}": self.landlock,
      "seccomp": self.seccomp,
      "own_uid": self.uids,
    }
    return [name for name, present in found.items() if present]


def _enter_as_root(flags: int, settings: dict[str, Any] | None) -> None:
  jail.unshare(flags)
  jail.keep_mounts_private()
  if settings is not None:
    paths = {path: False for path in settings["readable"]}
    jail.open_up({**paths, settings["directory"]: True})


def _enter_as_user(flags: int) -> None:
  jail.unshare_as_user(flags)
  jail.keep_mounts_private()


def _spare_uids() -> tuple[int, int]:
  """A range of user ids that nobody uses, within what this user namespace maps."""
  with open("/proc/self/uid_map") as file:
    rows = [[int(v) for v in line.split()] for line in file]
  for first, count in ((1 << 30, 1 << 29), (61000, 4000)):
    if any(r[0] <= first and first + count <= r[0] + r[2] for r in rows):
      return first, count
  return 0, 0


class Output:
  """The head and the tail of what a program writes, and how much that was."""

  def __init__(self, keep: int):
    self._head_size, self._tail_size = keep - keep // 2, keep // 2
    self.head, self.tail, self.total = bytearray(), bytearray(), 0

  def add(self, data: bytes) -> None:
    self.total += len(data)
    room = self._head_size - len(self.head)
    if room > 0:
      self.head += data[:room]
      data = data[room:]
    self.tail += data
    if len(self.tail) > self._tail_size:
      del self.tail[: len(self.tail) - self._tail_size]


class Watcher:
  """One run from request to result. A process of its own, which adopts whatever the run leaves.

  It is made before it is needed: the program's process stands by, and only the walls that depend on
  the request are raised after it came.
  """

  def __init__(self, walls: Walls, baseline: tuple[int, int]):
    self._walls = walls
    self._space, self._resident = baseline

  def serve(self, control: socket.socket, taken: int) -> None:
    """Stands by, serves the first run that comes on ``control``, and returns when all is dead."""
    jail.adopt_orphans()
    if self._walls.pid_namespace:
      self._walls.isolate_pids()
    out, out_write = os.pipe()
    err, err_write = os.pipe()
    report, report_write = os.pipe()
    request_read, request_write = os.pipe()
    pid = os.fork()
    if pid == 0:
      program = _Program(self._walls, self._space, request_read, report_write)
      program.start(out_write, err_write)
    for fd in (out_write, err_write, report_write, request_read):
      os.close(fd)
    for fd in (out, err, report):
      os.set_blocking(fd, False)
    connection = _next_run(control)
    if connection is None:
      _end_all(pid)
      return
    os.write(taken, struct.pack("=i", os.getpid()))
    os.close(taken)
    os.dup2(1, control.detach())
    try:
      request, stdin = receive(connection), receive(connection)
    except (EOFError, OSError):
      _end_all(pid)
      return
    start = time.monotonic()
    with contextlib.suppress(OSError), open(request_write, "wb") as pipe:
      # If the program's process ended during set-up, its report says why.
      for frame in (request, stdin):
        pipe.write(struct.pack("<Q", len(frame)) + frame)
    result = self._outcome(connection, pid, (out, err), report, json.loads(request), start)
    with contextlib.suppress(OSError):  # the caller may be gone
      connection.sendall(result)

  def _outcome(
    self,
    connection: socket.socket,
    pid: int,
    streams: tuple[int, int],
    report: int,
    request: dict[str, Any],
    start: float,
  ) -> bytes:
    """Waits for the end, kills what is left; one frame: length of the header, header, outputs."""
    limits = request["limits"]
    outputs = {fd: Output(limits["output_bytes"]) for fd in streams}
    reason, detail = self._watch(connection, pid, outputs, limits, start)
    status, cpu = _end_all(pid)
    for fd, output in outputs.items():
      _drain(fd, output)
    notes = _read_all(report)
    if notes.startswith(b"error "):
      reason, detail = "setup", notes[6:].decode(errors="replace")
    elif notes.startswith(b"exit "):
      status, cpu = int(notes.split()[1]), float(notes.split()[2])
    parts = [bytes(part) for o in outputs.values() for part in (o.head, o.tail)]
    header = {
      "reason": reason,
      "detail": detail,
      "exit_code": os.waitstatus_to_exitcode(status),
      "cpu_seconds": cpu,
      "seconds": time.monotonic() - start,
      "totals": [o.total for o in outputs.values()],
      "sizes": [len(part) for part in parts],
    }
    encoded = json.dumps(header).encode()
    body = struct.pack("<I", len(encoded)) + encoded + b"".join(parts)
    return struct.pack("<Q", len(body)) + body

  def _watch(
    self,
    connection: socket.socket,
    pid: int,
    outputs: dict[int, Output],
    limits: dict[str, Any],
    start: float,
  ) -> tuple[str, str]:
    """Waits for the first reason to end the run: (reason, detail)."""
    poll = select.poll()
    with contextlib.suppress(OSError):  # some kernels have none; then each tick looks
      poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    for fd in outputs:
      poll.register(fd, select.POLLIN)
    deadline = start + limits["wall_seconds"]
    look = start + _TICK
    while True:
      now = time.monotonic()
      if now >= deadline:
        return "wall", f"did not end within {limits['wall_seconds']:.1f} s"
      if now >= look:
        look = now + _TICK
        if too_much := self._too_much(pid, limits):
          return too_much
      events = poll.poll(1000 * (min(deadline, look) - now) + 1)
      for fd, _ in events:
        if fd in outputs:
          # A daemon may hold the pipe open after the program ended: the process decides, not EOF.
          if not _read_some(fd, outputs[fd]):
            poll.unregister(fd)
          elif outputs[fd].total > limits["output_kill_bytes"]:
            return "output", f"wrote more than {limits['output_kill_bytes']} bytes"
      if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return "exit", ""
      if any(fd == connection.fileno() for fd, _ in events):
        return "cancelled", "the caller cancelled the run"

  def _too_much(self, pid: int, limits: dict[str, Any]) -> tuple[str, str] | None:
    family = [pid, *_descendants(pid)]
    # pid 1 of the namespace is ours, and every process still holds pages of this interpreter
    resident = sum(max(0, _resident_bytes(p) - self._resident) for p in family)
    if resident > limits["memory_bytes"]:
      return "memory", f"its processes hold more than {limits['memory_bytes']} bytes together"
    tasks = sum(_task_count(p) for p in family) - (1 if self._walls.pid_namespace else 0)
    if tasks > limits["processes"]:
      return "processes", f"runs more than {limits['processes']} processes and threads"
    return None


class _Program:
  """The forked side of a run: waits for the request, raises the walls, becomes the program."""

  def __init__(self, walls: Walls, space: int, requests: int, report: int):
    self._walls, self._space = walls, space
    self._requests, self._report = requests, report

  def start(self, out: int, err: int) -> None:
    """Never returns."""
    try:
      jail.die_with_parent(signal.SIGKILL)
      if self._walls.pid_namespace:
        self._split_init()
      os.setsid()
      os.dup2(out, 1)
      os.dup2(err, 2)
      _close_all_but(0, 1, 2, self._requests, self._report)
      with open(self._requests, "rb") as pipe:
        request, stdin = (pipe.read(*struct.unpack("<Q", pipe.read(8))) for _ in range(2))
      self._become_ready(json.loads(request), stdin)
    except BaseException as error:
      self._note(f"error {type(error).__name__}: {error}")
      os._exit(127)
    _run_program(self._request["program"], self._request["directory"], self._report)

  def _become_ready(self, request: dict[str, Any], stdin: bytes) -> None:
    self._request = request
    if stdin:
      file = os.memfd_create("stdin")
      with open(file, "wb", closefd=False) as writer:
        writer.write(stdin)
      os.lseek(file, 0, os.SEEK_SET)
    else:
      file = os.open("/dev/null", os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    os.chdir(request["directory"])
    self._raise_walls()

  def _split_init(self) -> None:
    """Pid 1 only reaps and reports; the program gets an ordinary pid with ordinary signals."""
    program = os.fork()
    if program == 0:
      return
    _close_all_but(self._report)
    while True:
      pid, status, usage = os.wait4(-1, 0)
      if pid == program:
        self._note(f"exit {status} {usage.ru_utime + usage.ru_stime}")
        os._exit(0)

  def _raise_walls(self) -> None:
    request, walls = self._request, self._walls
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")
    limits = request["limits"]
    processes = limits["processes"]
    if walls.counts_apart:
      processes += 2  # the watcher and pid 1 count too
    elif not walls.uids:
      processes += request["tasks_of_user"]  # the kernel counts all of this user's tasks
    jail.limit(limits, address_space=self._space + limits["memory_bytes"], processes=processes)
    if request["uid"] is not None:
      jail.become(request["uid"])
      jail.die_with_parent(signal.SIGKILL)  # a change of user forgets it
    jail.no_new_privileges()
    if walls.landlock:
      jail.restrict_files(walls.readable, _DEVICES, request["directory"])
    jail.drop_capabilities()
    if walls.seccomp:
      walls.refuse_system_calls()

  def _note(self, text: str) -> None:
    with contextlib.suppress(OSError):
      os.write(self._report, text.encode(errors="replace")[:4000])


def _close_all_but(*keep: int) -> None:
  for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
    if fd not in keep:
      with contextlib.suppress(OSError):  # the listing's own is closed already
        os.close(fd)


def _next_run(control: socket.socket) -> socket.socket | None:
  """The socket of the next run; None when the host is gone. One of all watchers gets each."""
  size = array.array("i").itemsize
  while True:
    message, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(size))
    if not message:
      return None
    for _, _, data in ancillary:
      return socket.socket(fileno=array.array("i", data[:size])[0])


def _run_program(program: dict[str, Any], directory: str, report: int) -> None:
  """Runs in the jail; from here on nothing of this process can be trusted. Never returns."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  os.environ.update(HOME=directory, TMPDIR=directory, PWD=directory)
  if program["kind"] == "command":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
      os.execvp(program["argv"][0], program["argv"])
    except OSError as error:
      os.write(2, f"{program['argv'][0]}: {error.strerror}\n".encode())
    os._exit(127)
  os.close(report)
  _run_python(program, directory)


def _run_python(program: dict[str, Any], directory: str) -> None:
  sys.path.insert(0, directory)
  sys.argv = ["<tool>"]
  for name in [n for n in sys.modules if n.partition(".")[0] == "agentjax"]:
    del sys.modules[name]
  sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), errors="replace")
  for name, fd in (("stdout", 1), ("stderr", 2)):
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    errors = "surrogateescape" if fd == 1 else "backslashreplace"
    # By the line: what was printed before a forced end is not lost.
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
  gc.enable()
  random.seed(program["seed"])
  if (numpy := sys.modules.get("numpy")) is not None:
    numpy.random.seed(program["seed"] % 2**32)
  source, name = program["source"], "<tool>"
  linecache.cache[name] = (len(source), None, source.splitlines(True), name)
  main = types.ModuleType("__main__")
  main.__dict__["__builtins__"] = builtins
  sys.modules["__main__"] = main
  code = 0
  try:
    _execute(source, name, main.__dict__, show_last=program["kind"] == "cell")
  except SystemExit as request:
    code = _exit_code(request)
  except BaseException as error:
    code = 1
    _print_error(error)
  code = _finish(code)
  os._exit(code & 0xFF)


def _execute(source: str, name: str, namespace: dict[str, Any], *, show_last: bool) -> None:
  tree = ast.parse(source, name)
  last = tree.body[-1] if tree.body else None
  if not show_last or not isinstance(last, ast.Expr):
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    return
  tree.body.pop()
  exec(compile(tree, name, "exec", dont_inherit=True), namespace)
  value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
  if value is not None:
    print(repr(value))


def _exit_code(request: SystemExit) -> int:
  if request.code is None:
    return 0
  if isinstance(request.code, int):
    return request.code
  print(request.code, file=sys.stderr)
  return 1


def _print_error(error: BaseException) -> None:
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_code.co_filename != "<tool>":
    trace = trace.tb_next
  try:
    traceback.print_exception(type(error), error, trace)
  except BaseException:  # the program may have broken traceback, or its exception's __str__
    os.write(2, f"{type(error).__name__}\n".encode())


def _finish(code: int) -> int:
  """What an interpreter does at its end: join threads, atexit functions, flush."""
  try:
    if "threading" in sys.modules:
      sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
      sys.modules["atexit"]._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
  except BaseException:
    code = code or 1
  return code


# -- the family of a process, read from /proc


def _children(pid: int | str) -> list[int]:
  if not _HAS_CHILDREN_FILE:
    return _children_by_scan(os.getpid() if pid == "self" else int(pid))
  found: list[int] = []
  try:
    for task in os.listdir(f"/proc/{pid}/task"):
      with open(f"/proc/{pid}/task/{task}/children") as file:
        found += [int(child) for child in file.read().split()]
  except OSError:
    pass  # it ended meanwhile
  return found


def _children_by_scan(parent: int) -> list[int]:
  """For kernels built without the ``children`` files."""
  found: list[int] = []
  for entry in os.listdir("/proc"):
    try:
      with open(f"/proc/{int(entry)}/stat") as file:
        if int(file.read().rpartition(")")[2].split()[1]) == parent:
          found.append(int(entry))
    except (OSError, ValueError):
      continue
  return found


def _descendants(pid: int | str) -> list[int]:
  found = _children(pid)
  for child in found:  # grows while it is walked
    found += _children(child)
  return found


def _resident_bytes(pid: int) -> int:
  try:
    with open(f"/proc/{pid}/statm") as file:
      return int(file.read().split()[1]) * resource.getpagesize()
  except (OSError, IndexError):
    return 0


def _task_count(pid: int) -> int:
  try:
    return len(os.listdir(f"/proc/{pid}/task"))
  except OSError:
    return 0


def _end_all(pid: int) -> tuple[int, float]:
  """Kills and reaps every descendant; returns the wait status and CPU seconds of ``pid``."""
  outcome = (0, 0.0)
  while True:
    try:
      ended, status, usage = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
      return outcome
    if ended == pid:
      outcome = (status, usage.ru_utime + usage.ru_stime)
    if ended:
      continue
    for victim in _descendants("self"):
      try:
        os.kill(victim, signal.SIGKILL)
      except ProcessLookupError:
        pass
    time.sleep(0.001)


def _read_some(fd: int, output: Output) -> bool:
  """Reads once; False at the end of the pipe."""
  try:
    data = os.read(fd, 1 << 16)
  except BlockingIOError:
    return True
  output.add(data)
  return bool(data)


def _drain(fd: int, output: Output) -> None:
  before = -1
  while output.total != before:
    before = output.total
    _read_some(fd, output)


def _read_all(fd: int) -> bytes:
  try:
    return os.read(fd, 1 << 16)
  except BlockingIOError:
    return b""


def main(settings: dict[str, Any]) -> None:
  control = socket.socket(fileno=0)
  try:
    walls = Walls(settings)
    sys.path.extend(settings["packages_path"])
    for name in (*_COMMON, *settings["packages"]):
      importlib.import_module(name)
    if not hasattr(builtins, "exit"):
      site.setquit()
    with open("/proc/self/statm") as file:
      space, resident = (int(v) * resource.getpagesize() for v in file.read().split()[:2])
    hello = {
      "protections": walls.protections(),
      "mechanisms": walls.mechanisms(),
      "uids": [walls.first_uid, walls.uids],
    }
  except BaseException:
    control.sendall(json.dumps({"error": traceback.format_exc()}).encode())
    return
  control.sendall(json.dumps(hello).encode())
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to handle
  gc.collect()
  gc.freeze()  # the collector would touch, and so copy, many pages in each fork
  gc.disable()
  _keep_watchers(control, Watcher(walls, (space, resident)), settings["spare"])


_watchers: set[int] = set()  # children of this process that it forked itself


def _keep_watchers(control: socket.socket, watcher: Watcher, wanted: int) -> None:
  """Keeps ``wanted`` watchers standing by until the host closes ``control`` and all have ended."""
  jail.adopt_orphans()
  taken, taken_write = os.pipe()
  os.set_blocking(taken, False)
  poll = select.poll()
  poll.register(taken, select.POLLIN)
  poll.register(control, select.POLLRDHUP)
  spare: set[int] = set()
  while True:
    try:
      while len(spare) < wanted:
        spare.add(_fork_watcher(control, watcher, taken_write))
    except OSError:
      time.sleep(0.05)  # no process to be had; the runs in progress will free some
    events = poll.poll(1000)
    if any(fd == control.fileno() for fd, _ in events):
      break
    if events:
      data = os.read(taken, 4096)
      spare.difference_update(pid for (pid,) in struct.iter_unpack("=i", data))
    for pid in _reap_watchers():
      spare.discard(pid)
  # Each ends with its socket. Waited for, because not every machine's first process reaps.
  deadline = time.monotonic() + _LEAVE_SECONDS
  while _children("self") and time.monotonic() < deadline:
    _reap_watchers()
    time.sleep(0.002)


def _reap_watchers() -> list[int]:
  """Process ids of the children that ended. What a watcher that died by force left is killed."""
  ended = []
  with contextlib.suppress(ChildProcessError):
    while (child := os.waitpid(-1, os.WNOHANG))[0] != 0:
      ended.append(child[0])
      _watchers.discard(child[0])
      if os.WIFSIGNALED(child[1]):
        for orphan in set(_children("self")) - _watchers:
          for victim in (orphan, *_descendants(orphan)):
            with contextlib.suppress(ProcessLookupError):
              os.kill(victim, signal.SIGKILL)
  return ended


def _fork_watcher(control: socket.socket, watcher: Watcher, taken: int) -> int:
  pid = os.fork()
  if pid:
    _watchers.add(pid)
    return pid
  code = 1
  try:
    os.setsid()
    watcher.serve(control, taken)
    code = 0
  finally:
    os._exit(code)
