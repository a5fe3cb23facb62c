"""The sandbox's own interpreter: forks one watcher a run, which jails, times and ends the program.

Started as ``python -P -s -S`` with a scrubbed environment, never forked from the process that
trains; imports the standard library only. File descriptor 0 is the control socket: each message on
it carries the socket of one run. On that the host sends a request (frames, see ``receive``), the
watcher answers with one result, and the host closing it ends the run: none outlives its caller.

    host ── control ──► zygote ── fork ──► watcher ── fork ──► program

Where the machine grants it, the watcher is pid 1 of a namespace of its own: with it all dies. There
a process has two ids: the namespace's, which fork, wait and kill use, and the machine's, by which
/proc names it. The functions that read /proc take and give the machine's.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
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
import typing
from typing import Any

from agentjax.sandbox import jail, measure, programs

# What snippets import most; loaded once here, so that a run finds them ready.
_COMMON = (
  "atexit bisect collections copy csv dataclasses datetime decimal enum fractions functools "
  "heapq io itertools json math operator random re statistics string textwrap threading time "
  "typing"
).split()
_TICK = 0.02  # seconds between looks at memory and process counts of a run
_IDLE_TICK = 0.5  # seconds between looks at a session that waits
_REST_SECONDS = 2.0  # for a session to come to rest after a cell
_LEAVE_SECONDS = 4.0  # for the watchers to end after the host has gone
_PROGRAM_PID = 2  # in a namespace of its own, whose pid 1 is the watcher


class Walls:
  """Which walls this machine grants, found by trying each; ``settings`` come from the host."""

  def __init__(self, settings: dict[str, Any]):
    self.readable = [*jail.READABLE, *settings["readable"]]
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
    self.pid_namespace = False
    self.pid_namespace = (self.privileged or self.user_namespace) and jail.holds(self._try_pids)
    self.landlock = jail.landlock_version() if jail.holds(self._try_landlock) else 0
    # Where Landlock is missing, a file system of its own keeps a program from files.
    self.view = os.path.join(settings["directory"], "view")
    has_mounts = self.privileged or self.user_namespace
    if not self.landlock and has_mounts and jail.holds(functools.partial(self._try_view, settings)):
      self._build_view()
    else:
      self.view = ""
    self.seccomp = jail.seccomp_known() and jail.holds(self._try_seccomp)
    release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    # Before Linux 5.14 a user namespace did not count its processes apart.
    self.counts_apart = self.user_namespace and self.pid_namespace and release >= (5, 14)
    if self.seccomp and self.pid_namespace:
      jail.filter_code(_PROGRAM_PID, **self._refused())  # kept, so that no run makes it anew

  def fork(self) -> int:
    """Forks a watcher, into its own namespace of processes where there can be one."""
    if not self.pid_namespace:
      return os.fork()
    # A user namespace apart also counts its processes apart.
    return jail.fork(jail.CLONE_NEWPID | (jail.CLONE_NEWUSER if self.user_namespace else 0))

  def _try_pids(self) -> None:
    self.pid_namespace = True
    pid = self.fork()
    if pid == 0:
      os._exit(0 if os.getpid() == 1 == measure.ids_by_namespace("self")[-1] else 1)
    if os.waitpid(pid, 0)[1] != 0:
      raise OSError

  def _change_user(self, settings: dict[str, Any], inner: int) -> None:
    if self.privileged:
      _enter_as_root(inner, settings)
    jail.become(self.first_uid)
    os.stat(os.path.join(settings["directory"], "."))
    for path in settings["readable"]:
      os.listdir(path)
    with open(os.__file__):
      pass

  def _build_view(self) -> None:
    os.makedirs(self.view, mode=0o755, exist_ok=True)
    jail.build_view(self.view, self.readable, jail.DEVICES)

  def _try_view(self, settings: dict[str, Any]) -> None:
    """In a child that has mounts of its own, so that none of them stays."""
    jail.unshare(jail.CLONE_NEWNS)
    self._build_view()
    jail.enter_view(self.view, settings["directory"])
    if self.uids:
      jail.become(self.first_uid)
    for path in settings["readable"]:
      os.listdir(path)

  def _try_landlock(self) -> None:
    if jail.landlock_version() == 0:
      raise OSError
    jail.no_new_privileges()
    jail.restrict_files(jail.file_rules(self.readable, jail.DEVICES), "/tmp")

  def _try_seccomp(self) -> None:
    jail.no_new_privileges()
    self.refuse_system_calls()

  def refuse_system_calls(self) -> None:
    jail.refuse_system_calls(os.getpid(), **self._refused())

  def _refused(self) -> dict[str, bool]:
    return {
      "own_pid_namespace": self.pid_namespace,
      "own_user": bool(self.uids),
      "signals_scoped": self.landlock >= 6,
      "files_guarded": bool(self.frozen or self.uids),
    }

  def protections(self) -> list[str]:
    names = ["limits", "descendants"]
    if self.seccomp:  # a network namespace alone would leave unix sockets in the file system
      names.append("network")
    signals = self.pid_namespace or self.uids or self.landlock >= 6 or self.seccomp
    apart = self.user_namespace and self.pid_namespace
    if signals and (apart or self.uids or self.landlock or self.view):
      names.append("processes")
    # Landlock before version 3 lets a file be truncated; a change of its mode it always lets pass.
    guarded = self.frozen or self.uids or (self.landlock >= 3 and self.seccomp)
    if (self.landlock and guarded) or self.view:
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
      "own_file_system": self.view,
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


class Watcher:
  """One run from request to result. A process of its own, which adopts whatever the run leaves.

  It is made before it is needed: the program's process stands by, and only the walls that depend on
  the request are raised after it came.
  """

  def __init__(self, walls: Walls, baseline: tuple[int, int]):
    self._walls = walls
    self._space, self._resident = baseline
    self.fork = walls.fork

  def serve(self, control: socket.socket, taken: int, number: int) -> None:
    """Stands by, serves the first run that comes on ``control``, and returns when all is dead.

    Once it is taken it writes ``number`` to ``taken``.
    """
    jail.adopt_orphans()
    jail.be_readable(value=False)  # a program of the same user may be able to name it
    out, out_write = os.pipe()
    err, err_write = os.pipe()
    report, report_write = os.pipe()
    channel, channel_theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
      program = _Program(self._walls, self._space, channel_theirs, report_write)
      program.start(out_write, err_write)
    for fd in (out_write, err_write, report_write, channel_theirs.detach()):
      os.close(fd)
    for fd in (out, err, report):
      os.set_blocking(fd, False)
    connection = _next_run(control)
    if connection is None:
      _end_all(pid)
      return
    os.write(taken, struct.pack("=i", number))
    os.close(taken)
    os.dup2(1, control.detach())
    try:
      request, stdin = programs.receive(connection), programs.receive(connection)
    except (EOFError, OSError):
      _end_all(pid)
      return
    run = _Run(self._walls, self._resident, json.loads(request), connection, pid)
    run.attach((out, err), report, channel)
    run.start(request, stdin)
    if run.is_session:
      run.serve_cells()
    else:
      run.serve_program()


class _Ending(typing.NamedTuple):
  """Why a run or a cell is over. ``exit_code`` counts for a cell that ended by itself."""

  reason: str
  detail: str = ""
  exit_code: int = 0


class _Run:
  """The program of one run as its watcher sees it: told what to do, timed, measured, ended."""

  def __init__(
    self,
    walls: Walls,
    resident: int,
    request: dict[str, Any],
    connection: socket.socket,
    pid: int,
  ):
    self._walls, self._resident = walls, resident
    self._limits = request["limits"]
    self._disk = measure.Disk(request["directory"], self._limits)
    self.is_session = request["program"]["kind"] == "session"
    self._connection, self._pid = connection, pid
    self._poll = select.poll()
    with contextlib.suppress(OSError):  # some kernels have none; then each tick looks
      self._poll.register(os.pidfd_open(pid), select.POLLIN)
    self._poll.register(connection, select.POLLIN | select.POLLRDHUP)

  def attach(self, streams: tuple[int, int], report: int, channel: socket.socket) -> None:
    """The watcher's ends of what it shares with the program."""
    self._streams, self._report, self._channel = streams, report, channel

  def start(self, request: bytes, stdin: bytes) -> None:
    """Hands the standing program what it is to become."""
    self._began = time.monotonic()
    with contextlib.suppress(OSError):
      # If the program's process ended during set-up, its report says why.
      for frame in (request, stdin):
        self._channel.sendall(struct.pack("<Q", len(frame)) + frame)

  def serve_program(self) -> None:
    """Waits for the end, kills what is left, answers with the result."""
    self._channel.close()
    outputs = self._new_outputs()
    ending = self._watch(outputs, self._limits["wall_seconds"], None)
    self._answer(ending, outputs, *_end_all(self._pid))

  def serve_cells(self) -> None:
    """Runs cells in one interpreter, a frame for each and one back, until it or the host is gone.

    Between cells the interpreter is stopped and nothing else of the run lives.
    """
    interpreter = measure.children("self")[0]  # nothing ran yet, so it has no sisters
    while (cell := self._next_cell(interpreter)) is not None:
      self._began = time.monotonic()
      outputs = self._new_outputs()
      try:
        os.kill(self._pid, signal.SIGCONT)
        self._channel.sendall(struct.pack("<Q", len(cell)) + cell)
      except OSError:  # it died between cells, or could not be set up
        self._answer(_Ending("gone"), outputs, *_end_all(self._pid))
        return
      used = measure.cpu_seconds(measure.descendants("self"))
      ending = self._watch(outputs, json.loads(cell)["wall_seconds"], used)
      if ending.reason != "cell" or not self._rest(interpreter):
        self._answer(ending, outputs, *_end_all(self._pid))
        return
      self._answer(ending, outputs, ending.exit_code << 8, 0.0, alive=True)
    _end_all(self._pid)

  def _next_cell(self, interpreter: int) -> bytes | None:
    """Waits for a cell; None when the host is gone. Keeps the run at rest meanwhile."""
    while not select.select([self._connection], [], [], _IDLE_TICK)[0]:
      self._rest(interpreter)  # a chain of short-lived processes may have slipped through before
    try:
      return programs.receive(self._connection)
    except (EOFError, OSError):
      return None

  def _rest(self, interpreter: int) -> bool:
    """Stops the interpreter and kills all it started; False when it is dead or cannot be had so."""
    deadline = time.monotonic() + _REST_SECONDS
    while time.monotonic() < deadline:
      try:
        os.kill(self._pid, signal.SIGSTOP)
      except ProcessLookupError:
        return False
      still = measure.states(interpreter) == {"T"}
      others = set(measure.descendants("self")) - {interpreter}
      living = {pid for pid in others if not measure.states(pid) <= {"Z", "X"}}
      for pid in living:
        measure.kill(pid)
      for pid in others - living:
        if inner := measure.own_id(pid):
          with contextlib.suppress(ChildProcessError):  # only orphans are this process's to reap
            os.waitpid(inner, os.WNOHANG)
      if still and not living:
        _discard(self._channel)
        return not self._ended()
      time.sleep(0.0002)
    return False

  def _new_outputs(self) -> dict[int, measure.Output]:
    for fd in self._streams:
      self._poll.register(fd, select.POLLIN)
    return {fd: measure.Output(self._limits["output_bytes"]) for fd in self._streams}

  def _answer(
    self,
    ending: _Ending,
    outputs: dict[int, measure.Output],
    status: int,
    cpu: float,
    *,
    alive: bool = False,
  ) -> None:
    """Sends one frame: length of the header, header, outputs."""
    for fd, output in outputs.items():
      _drain(fd, output)
    reason, detail = ending.reason, ending.detail
    notes = _read_all(self._report)
    if notes.startswith(b"error "):
      reason, detail = "setup", notes[6:].decode(errors="replace")
    parts = [bytes(part) for o in outputs.values() for part in (o.head, o.tail)]
    header = {
      "reason": reason,
      "detail": detail,
      "alive": alive,
      "exit_code": os.waitstatus_to_exitcode(status),
      "cpu_seconds": cpu,
      "seconds": time.monotonic() - self._began,
      "totals": [o.total for o in outputs.values()],
      "sizes": [len(part) for part in parts],
    }
    encoded = json.dumps(header).encode()
    body = struct.pack("<I", len(encoded)) + encoded + b"".join(parts)
    with contextlib.suppress(OSError):  # the caller may be gone
      self._connection.sendall(struct.pack("<Q", len(body)) + body)

  def _watch(
    self, outputs: dict[int, measure.Output], wall_seconds: float, cpu_start: float | None
  ) -> _Ending:
    """Waits for the first reason to end the run, or the cell where there is a ``cpu_start``."""
    if cpu_start is not None:
      self._poll.register(self._channel, select.POLLIN)
    deadline = self._began + wall_seconds
    look = self._began + _TICK
    most = self._limits["output_kill_bytes"]
    while True:
      now = time.monotonic()
      if now >= deadline:
        return _Ending("wall", f"did not end within {wall_seconds:.1f} s")
      if now >= look:
        look = now + _TICK
        if too_much := self._too_much(cpu_start):
          return too_much
      ready = {fd for fd, _ in self._poll.poll(1000 * (min(deadline, look) - now) + 1)}
      for fd in ready & outputs.keys():
        # A daemon may hold the pipe open after the program ended: the process decides, not EOF.
        if not _read_some(fd, outputs[fd]):
          self._poll.unregister(fd)
        elif outputs[fd].total > most:
          return _Ending("output", f"wrote more than {most} bytes")
      if self._ended():
        return _Ending("exit")
      if self._connection.fileno() in ready:
        return _Ending("cancelled", "the caller cancelled the run")
      if self._channel.fileno() in ready:
        self._poll.unregister(self._channel)
        if code := self._channel.recv(4096):
          return _Ending("cell", exit_code=code[0])
        # Closed: the interpreter is about to end, or has a program that closed it.

  def _ended(self) -> bool:
    return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

  def _too_much(self, cpu_start: float | None) -> _Ending | None:
    limits = self._limits
    family = measure.descendants("self")
    # Every process still holds pages of this interpreter.
    resident = sum(max(0, measure.resident_bytes(p) - self._resident) for p in family)
    if resident > limits["memory_bytes"]:
      return _Ending(
        "memory", f"its processes hold more than {limits['memory_bytes']} bytes together"
      )
    tasks = sum(measure.task_count(p) for p in family)
    if tasks > limits["processes"]:
      return _Ending("processes", f"runs more than {limits['processes']} processes and threads")
    if cpu_start is not None and measure.cpu_seconds(family) - cpu_start > limits["cpu_seconds"]:
      return _Ending("cpu")
    if (detail := self._disk.too_much(family)) is not None:
      return _Ending("disk", detail)
    return None


class _Program:
  """The forked side of a run: waits for the request, raises the walls, becomes the program."""

  def __init__(self, walls: Walls, space: int, channel: socket.socket, report: int):
    self._walls, self._space = walls, space
    self._channel, self._report = channel, report

  def start(self, out: int, err: int) -> None:
    """Never returns."""
    try:
      jail.die_with_parent(signal.SIGKILL)
      jail.be_readable(value=True)
      os.setsid()
      os.dup2(out, 1)
      os.dup2(err, 2)
      _close_all_but(0, 1, 2, self._channel.fileno(), self._report)
      if self._walls.landlock:
        self._rules = jail.file_rules(self._walls.readable, jail.DEVICES)
      for name in _own_modules:
        sys.modules.pop(name)
      namespace = programs.prepare_python()
      request, stdin = programs.receive(self._channel), programs.receive(self._channel)
      self._become_ready(json.loads(request), stdin)
    except BaseException as error:
      self._note(f"error {type(error).__name__}: {error}")
      os._exit(127)
    programs.run_program(self._request, self._report, self._channel, namespace)

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

  def _raise_walls(self) -> None:
    request, walls = self._request, self._walls
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")
    limits = request["limits"]
    processes = limits["processes"]
    if walls.counts_apart:
      processes += 1  # the watcher counts too
    elif not walls.uids:
      processes += request["tasks_of_user"]  # the kernel counts all of this user's tasks
    jail.limit(
      limits,
      address_space=self._space + limits["memory_bytes"],
      processes=processes,
      # A session's interpreter outlives its cells, so the watcher counts the time of each.
      cpu_seconds=None if request["program"]["kind"] == "session" else limits["cpu_seconds"],
    )
    if walls.view:
      jail.enter_view(walls.view, request["directory"])
      request["directory"] = jail.BOX
    if request["uid"] is not None:
      jail.become(request["uid"])
      jail.die_with_parent(signal.SIGKILL)  # a change of user forgets it
    jail.no_new_privileges()
    if walls.landlock:
      jail.restrict_files(self._rules, request["directory"])
    jail.drop_capabilities()
    if walls.seccomp:
      walls.refuse_system_calls()

  def _note(self, text: str) -> None:
    with contextlib.suppress(OSError):
      os.write(self._report, text.encode(errors="replace")[:4000])


def _close_all_but(*keep: int) -> None:
  first = 0
  for fd in sorted(keep):
    if first < fd:  # an empty range would be taken for all
      os.closerange(first, fd)
    first = fd + 1
  os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _next_run(control: socket.socket) -> socket.socket | None:
  """The socket of the next run; None when the host is gone. One of all watchers gets each."""
  size = array.array("i").itemsize
  while True:
    message, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(size))
    if not message:
      return None
    for _, _, data in ancillary:
      return socket.socket(fileno=array.array("i", data[:size])[0])


def _end_all(pid: int) -> tuple[int, float]:
  """Kills and reaps every descendant; returns the wait status and CPU seconds of ``pid``."""
  outcome = (0, 0.0)
  rules_namespace = os.getpid() == 1
  while True:
    try:
      ended, status, usage = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
      return outcome
    if ended == pid:
      outcome = (status, usage.ru_utime + usage.ru_stime)
    if ended:
      continue
    if rules_namespace:
      with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    else:
      for victim in measure.descendants("self"):
        measure.kill(victim)
    time.sleep(0.001)


def _read_some(fd: int, output: measure.Output) -> bool:
  """Reads once; False at the end of the pipe."""
  try:
    data = os.read(fd, 1 << 16)
  except BlockingIOError:
    return True
  output.add(data)
  return bool(data)


def _discard(connection: socket.socket) -> None:
  """Drops what was sent but not read."""
  with contextlib.suppress(OSError):  # nothing more
    while connection.recv(1 << 16, socket.MSG_DONTWAIT):
      pass


def _drain(fd: int, output: measure.Output) -> None:
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
    if "numpy" in sys.modules:
      importlib.import_module("numpy.random").seed(0)  # numpy leaves it for the first use
    if (threads := measure.task_count(os.getpid())) > 1:
      raise RuntimeError(
        f"the packages {', '.join(settings['packages'])} start {threads - 1} threads when they are "
        "imported, which no fork survives; leave out the one that does"
      )
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


# Known before a fork: to look for them among all would copy many pages.
_own_modules = tuple(name for name in sys.modules if name.partition(".")[0] == "agentjax")
_watchers: set[int] = set()  # children of this process that it forked itself


def _keep_watchers(control: socket.socket, watcher: Watcher, wanted: int) -> None:
  """Keeps ``wanted`` watchers standing by until the host closes ``control`` and all have ended."""
  jail.adopt_orphans()
  taken, taken_write = os.pipe()
  os.set_blocking(taken, False)
  poll = select.poll()
  poll.register(taken, select.POLLIN)
  poll.register(control, select.POLLRDHUP)
  spare: dict[int, int] = {}  # process ids by number
  numbers = itertools.count()
  while True:
    try:
      while len(spare) < wanted:
        number = next(numbers)
        spare[number] = _fork_watcher(control, watcher, taken_write, number)
    except OSError:
      time.sleep(0.05)  # no process to be had; the runs in progress will free some
    events = poll.poll(1000)
    if any(fd == control.fileno() for fd, _ in events):
      break
    if events:
      data = os.read(taken, 4096)
      for (number,) in struct.iter_unpack("=i", data):
        spare.pop(number, None)
    if ended := set(_reap_watchers()):
      spare = {number: pid for number, pid in spare.items() if pid not in ended}
  # Each ends with its socket. Waited for, because not every machine's first process reaps.
  deadline = time.monotonic() + _LEAVE_SECONDS
  while measure.children("self") and time.monotonic() < deadline:
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
        for orphan in set(measure.children("self")) - _watchers:
          for victim in (orphan, *measure.descendants(orphan)):
            measure.kill(victim)
  return ended


def _fork_watcher(control: socket.socket, watcher: Watcher, taken: int, number: int) -> int:
  pid = watcher.fork()
  if pid:
    _watchers.add(pid)
    return pid
  code = 1
  try:
    os.setsid()
    watcher.serve(control, taken, number)
    code = 0
  finally:
    os._exit(code)
