"""The sandbox's own interpreter: forks the watchers, which jail, time and end programs.

Started as ``python -P -s -S`` with a scrubbed environment, never forked from the process that
trains; imports the standard library only. File descriptor 0 is the control socket: each message on
it is one run: its bounds, the socket on which the watcher answers with one result, and files that
the program's process alone reads. The host closing that socket ends the run: none outlives its
caller.

    host ── control ──► zygote ── fork ──► watcher ── fork ──► program
                               └── fork ──► keeper (``disks``)

Where the machine grants it, the watcher is pid 1 of a namespace of its own: with it all dies. There
a process has two ids: the namespace's, which fork, wait and kill use, and the machine's, by which
/proc names it. The functions that read /proc take and give the machine's.
"""

from __future__ import annotations

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
import tempfile
import time
import traceback
import typing
from typing import Any

from agentjax.sandbox import disks, groups, jail, measure, programs

# What snippets import most; loaded once here, so that a run finds them ready.
_COMMON = (
  "atexit bisect collections copy csv dataclasses datetime decimal enum fractions functools "
  "heapq io itertools json math operator random re statistics string textwrap threading time "
  "typing"
).split()
_TICK = 0.02  # seconds between looks at memory and process counts of a run
_IDLE_TICK = 0.5  # seconds between looks at a session that waits
_REST_SECONDS = 2.0  # for a session to come to rest after a cell
_LEAVE_SECONDS = 4.0  # for the watchers to end after the host has gone, then for what is killed
_HOST_SECONDS = 600.0  # for a host that is there to send what it began or to take an answer
_RUNS_OF_WATCHER = 256  # that one may serve, so that nothing piles up in it
_BRIEF_SECONDS = 0.1  # of a run after which its watcher may serve another
_PROGRAM_PID = 2  # in a namespace of its own, whose pid 1 is the watcher


class Walls:
  """Which walls this machine grants, found by trying each; ``settings`` come from the host."""

  def __init__(self, settings: dict[str, Any]):
    self.readable = [*jail.READABLE, *settings["readable"]]
    self.groups = None if settings["group"] is None else groups.Groups(settings["group"])
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
    # A file system of its own keeps a program from all other files, and from the boxes' parent.
    self.view = os.path.join(settings["directory"], "view")
    has_mounts = self.privileged or self.user_namespace
    if has_mounts and jail.holds(functools.partial(self._try_view, settings)):
      self._build_view()
    else:
      self.view = ""
    self.own_disks = bool(
      settings["disks"] is not None
      and self.view
      and jail.holds(functools.partial(self._try_disk, settings["directory"]))
    )
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
    devices = (*jail.DEVICES, jail.ZEROS) if self.landlock else jail.DEVICES
    jail.build_view(self.view, self.readable, devices)

  def _try_view(self, settings: dict[str, Any]) -> None:
    """In a child that has mounts of its own, so that none of them stays."""
    jail.unshare(jail.CLONE_NEWNS)
    self._build_view()
    jail.unshare(jail.CLONE_NEWNS)
    jail.enter_view(self.view, settings["directory"])
    if self.uids:
      jail.become(self.first_uid)
    for path in settings["readable"]:
      os.listdir(path)

  def _try_disk(self, directory: str) -> None:
    """Whether a run would meet the bounds of a disk that the keeper made."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = os.fork()
    if keeper == 0:
      requests.close()
      disks.keep(theirs, directory)
      os._exit(0)
    theirs.close()
    disk = disks.Disk(requests, self.first_uid if self.uids else None, (1 << 16, 2))
    mount = disks.received(disk.ask())
    pid = self.fork()
    if pid == 0:
      jail.unshare(jail.CLONE_NEWNS)
      jail.enter_view(self.view, mount)
      if self.uids:
        jail.become(self.first_uid)
      with open("full", "wb", buffering=0) as file:
        written = sum(file.write(bytes(1 << 12)) for _ in range(16))
        with contextlib.suppress(OSError):
          written += file.write(b"x")
      os._exit(0 if written == 1 << 16 else 1)
    ended = os.waitpid(pid, 0)[1]
    requests.close()
    os.waitpid(keeper, 0)
    if ended:
      raise OSError

  def _try_landlock(self) -> None:
    if jail.landlock_version() == 0:
      raise OSError
    jail.no_new_privileges()
    jail.restrict_files(jail.file_rules(self.readable, jail.DEVICES), "/tmp")

  def _try_seccomp(self) -> None:
    jail.no_new_privileges()
    self.refuse_system_calls()

  def file_rules(self) -> list[int]:
    """A descriptor for ``jail.restrict_files``, or none."""
    return [jail.file_rules(self.readable, jail.DEVICES)] if self.landlock else []

  def refuse_system_calls(self) -> None:
    jail.refuse_system_calls(os.getpid(), **self._refused())

  def _refused(self) -> dict[str, bool]:
    return {
      "own_pid_namespace": self.pid_namespace,
      "own_user": bool(self.uids),
      "signals_scoped": self.landlock >= 6,
      "files_guarded": bool((self.frozen and self.view) or self.uids),
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
    guarded = (self.frozen and self.view) or self.uids or (self.landlock >= 3 and self.seccomp)
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
      "disk_in_memory": self.own_disks,
      "disk_by_looking": not self.own_disks,
      "memory_group": self.groups,
      "memory_by_looking": not self.groups,
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


class _Order(typing.NamedTuple):
  """What a watcher learns of a run. It reads no file of ``inputs``."""

  is_session: bool
  limits: dict[str, Any]
  connection: socket.socket  # to the host
  directory: int  # descriptor of the box's, or of the socket on which its disk comes
  inputs: list[int]  # descriptors of the request, and of the program's stdin if it has any


class Watcher:
  """Sees runs through, from request to result. A process of its own, which adopts what they leave.

  A program's process stands by before it is needed; only the walls that depend on the request are
  raised after it came. It is a fork of this process, so nothing of a run may stay in the memory of
  one that serves another: it never reads requests, wipes outputs, and is used again only after a
  run that ended by itself before its files were looked at.
  """

  def __init__(self, walls: Walls, baseline: tuple[int, int], namespace: dict[str, Any]):
    self._walls, self._namespace = walls, namespace
    self._space, self._resident = baseline
    self.fork = walls.fork

  def serve(self, control: socket.socket, news: int, room: int, number: int) -> None:
    """Serves runs that come on ``control`` and returns when all is dead and no more may come.

    Writes ``number`` to ``news`` when a run is taken, and again when it is free for the next. It is
    free only where it finds a place among those that stand by: a byte in ``room``.
    """
    jail.adopt_orphans()
    jail.be_readable(value=False)  # a program of the same user may be able to name it
    jail.bound_capabilities()
    if self._walls.view:
      jail.unshare(jail.CLONE_NEWNS)  # in which one box after another is mounted
    for served in range(_RUNS_OF_WATCHER):
      if served and not _take_place(room):
        return
      run = self._standing()
      if served:
        os.write(news, struct.pack("=i?", number, True))
      if (order := _next_order(control)) is None:
        run.end()
        return
      os.write(news, struct.pack("=i?", number, False))
      if not run.serve(order):
        return
      if self._walls.view:
        jail.empty_view(self._walls.view)
      if self._walls.pid_namespace:
        jail.number_processes_from(_PROGRAM_PID)

  def _standing(self) -> _Run:
    out, out_write = os.pipe()
    err, err_write = os.pipe()
    report, report_write = os.pipe()
    channel, channel_theirs = socket.socketpair()
    rules = self._walls.file_rules()  # cheaper than after the fork, which makes each write a copy
    pid = os.fork()
    if pid == 0:
      program = _Program(self._walls, self._space, channel_theirs, report_write, rules)
      program.start(out_write, err_write, self._namespace)
    for fd in (out_write, err_write, report_write, channel_theirs.detach(), *rules):
      os.close(fd)
    for fd in (out, err, report):
      os.set_blocking(fd, False)
    return _Run(self._walls, self._resident, pid, (out, err), report, channel)


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
    pid: int,
    streams: tuple[int, int],
    report: int,
    channel: socket.socket,
  ):
    self._walls, self._resident, self._pid = walls, resident, pid
    self._disk: measure.Disk | None = None
    self._group: groups.Group | None = None
    self._streams, self._report, self._channel = streams, report, channel
    self._poll = select.poll()

  def end(self) -> None:
    _end_all(self._pid)

  def serve(self, order: _Order) -> bool:
    """Sees it through to the answer; whether this process may serve another."""
    self._limits, self._connection = order.limits, order.connection
    self._connection.settimeout(_HOST_SECONDS)
    self._began = time.monotonic()
    if self._walls.groups:
      self._group = self._walls.groups.new(self._most_memory(), order.limits["processes"])
      with contextlib.suppress(ProcessLookupError):  # its report says why it ended
        self._group.add(self._pid)
    if not self._walls.own_disks:
      self._disk = measure.Disk(f"/proc/self/fd/{order.directory}", order.limits)
    with contextlib.suppress(OSError):
      # If the program's process ended during set-up, its report says why.
      socket.send_fds(self._channel, [b"run"], [order.directory, *order.inputs])
    for fd in order.inputs:
      os.close(fd)
    ended = -1
    with contextlib.suppress(OSError):  # some kernels have none; then each tick looks
      ended = os.pidfd_open(self._pid)
      self._poll.register(ended, select.POLLIN)
    self._poll.register(self._connection, select.POLLIN | select.POLLRDHUP)
    clean = False
    if order.is_session:
      self.serve_cells()
    else:
      clean = self.serve_program()
    if self._group:
      self._group.remove()
    for fd in (*self._streams, self._report, order.directory, ended):
      if fd >= 0:
        os.close(fd)
    self._connection.close()
    return clean

  def _most_memory(self) -> int:
    """What all of the run may take: its own, the interpreter's copied pages, its disk's pages."""
    disk = self._limits["disk_bytes"] if self._walls.own_disks else 0
    return self._limits["memory_bytes"] + self._resident + disk

  def serve_program(self) -> bool:
    """Waits for the end, kills what is left, answers; whether nothing of the run is left here."""
    self._channel.close()
    outputs = self._new_outputs()
    ending = self._watch(outputs, self._limits["wall_seconds"], None)
    reason = self._answer(ending, outputs, *_end_all(self._pid))
    brief = time.monotonic() - self._began < _BRIEF_SECONDS
    return reason == "exit" and brief and not (self._disk and self._disk.looked)

  def serve_cells(self) -> None:
    """Runs cells in one interpreter, a frame for each and one back, until it or the host is gone.

    Between cells the interpreter is stopped and nothing else of the run lives.
    """
    interpreter = measure.children("self")[0]  # nothing ran yet, so it has no sisters
    self._channel.setblocking(False)  # its other end is in the hands of what the policy wrote
    while (cell := self._next_cell(interpreter)) is not None:
      self._began = time.monotonic()
      outputs = self._new_outputs()
      self._unsent = memoryview(struct.pack("<Q", len(cell)) + cell)
      try:
        os.kill(self._pid, signal.SIGCONT)
        self._send()
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

  def _send(self) -> None:
    """Sends what the interpreter takes of the cell now. Raises OSError where it is gone."""
    with contextlib.suppress(BlockingIOError):
      while self._unsent:
        self._unsent = self._unsent[self._channel.send(self._unsent) :]

  def _hear(self, events: int) -> _Ending | None:
    """Goes on with the interpreter: sends what is left of the cell, or learns that it is over."""
    said = b""
    if events & (select.POLLIN | select.POLLHUP):
      with contextlib.suppress(OSError):
        said = self._channel.recv(4096)
      if said and self._unsent:
        return _Ending("broken", "its program spoke in the name of the interpreter")
      if said:
        return _Ending("cell", exit_code=said[0])
      # Closed: the interpreter is about to end, or has a program that closed it.
      self._poll.unregister(self._channel)
      return None
    with contextlib.suppress(OSError):  # closed: then there is something to read next
      self._send()
    if not self._unsent:
      self._poll.modify(self._channel, select.POLLIN)
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
  ) -> str:
    """Sends one frame: length of the header, header, outputs; wipes these. Returns the reason."""
    for fd, output in outputs.items():
      _drain(fd, output)
    reason, detail = ending.reason, ending.detail
    if reason == "exit" and self._group and self._group.ran_out():
      reason, detail = "memory", f"took more than {self._most_memory()} bytes with all it holds"
    notes = _read_all(self._report)
    if notes.startswith(b"error "):
      reason, detail = "setup", notes[6:].decode(errors="replace")
    views = [output.views() for output in outputs.values()]
    sizes = [n for head, *tail in views for n in (len(head), sum(len(t) for t in tail))]
    header = {
      "reason": reason,
      "detail": detail,
      "alive": alive,
      "exit_code": os.waitstatus_to_exitcode(status),
      "cpu_seconds": cpu,
      "seconds": time.monotonic() - self._began,
      "totals": [o.total for o in outputs.values()],
      "sizes": sizes,
    }
    encoded = json.dumps(header).encode()
    length = 4 + len(encoded) + sum(sizes)
    with contextlib.suppress(OSError):  # the caller may be gone
      self._connection.sendall(struct.pack("<QI", length, len(encoded)) + encoded)
      for part in itertools.chain.from_iterable(views):
        if part:
          self._connection.sendall(part)
    for output in outputs.values():
      output.wipe()
    _wipe_scratch()
    return reason

  def _watch(
    self, outputs: dict[int, measure.Output], wall_seconds: float, cpu_start: float | None
  ) -> _Ending:
    """Waits for the first reason to end the run, or the cell where there is a ``cpu_start``."""
    if cpu_start is not None:
      self._poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
    deadline = self._began + wall_seconds
    if self._disk:
      self._disk.deadline = deadline
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
      ready = dict(self._poll.poll(1000 * (min(deadline, look) - now) + 1))
      for fd in ready.keys() & outputs.keys():
        # A daemon may hold the pipe open after the program ended: the process decides, not EOF.
        if not _read_some(fd, outputs[fd]):
          self._poll.unregister(fd)
        elif outputs[fd].total > most:
          return _Ending("output", f"wrote more than {most} bytes")
      if self._ended():
        return _Ending("exit")
      if self._connection.fileno() in ready:
        return _Ending("cancelled", "the caller cancelled the run")
      events = ready.get(self._channel.fileno())
      if events is not None and (ending := self._hear(events)):
        return ending

  def _ended(self) -> bool:
    return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

  def _too_much(self, cpu_start: float | None) -> _Ending | None:
    limits = self._limits
    family = measure.descendants("self")
    # Every process still holds pages of this interpreter.
    resident = measure.resident_beyond(family, self._resident, limits["memory_bytes"])
    if resident > limits["memory_bytes"]:
      return _Ending(
        "memory", f"its processes hold more than {limits['memory_bytes']} bytes together"
      )
    tasks = sum(measure.task_count(p) for p in family)
    if tasks > limits["processes"]:
      return _Ending("processes", f"runs more than {limits['processes']} processes and threads")
    if cpu_start is not None and measure.cpu_seconds(family) - cpu_start > limits["cpu_seconds"]:
      return _Ending("cpu")
    if self._disk and (detail := self._disk.too_much(family)) is not None:
      return _Ending("disk", detail)
    return None


class _Program:
  """The forked side of a run: waits for the request, raises the walls, becomes the program."""

  def __init__(
    self, walls: Walls, space: int, channel: socket.socket, report: int, rules: list[int]
  ):
    self._walls, self._space, self._rules = walls, space, rules
    self._channel, self._report = channel, report

  def start(self, out: int, err: int, namespace: dict[str, Any]) -> None:
    """Becomes the program, with ``namespace`` for that of its ``__main__``. Never returns."""
    try:
      jail.die_with_parent(signal.SIGKILL)
      jail.be_readable(value=True)
      os.setsid()
      os.dup2(out, 1)
      os.dup2(err, 2)
      _close_all_but(0, 1, 2, self._channel.fileno(), self._report, *self._rules)
      # What any program does is done here while there is time, so that its pages are copied before.
      rehearsal = {"source": "[str(i) for i in range(2)]", "seed": 0}
      programs.run_source(rehearsal, "<tool>", {}, show_last=False)
      self._become_ready(*self._inputs())
    except BaseException as error:
      self._note(f"error {type(error).__name__}: {error}")
      os._exit(127)
    programs.run_program(self._request, self._report, self._channel, namespace)

  def _inputs(self) -> tuple[int, int, int]:
    """Descriptors of the directory, the request and what the program reads."""
    _, fds, _, _ = socket.recv_fds(self._channel, 16, 3)
    if not fds:
      raise EOFError
    return fds[0], fds[1], fds[2] if len(fds) > 2 else os.open(os.devnull, os.O_RDONLY)

  def _become_ready(self, directory: int, request: int, stdin: int) -> None:
    with open(request, "rb") as file:
      self._request = json.load(file)
    os.dup2(stdin, 0)
    os.close(stdin)
    self._mount = None
    if self._walls.own_disks:
      self._mount = disks.received(socket.socket(fileno=directory))
    else:
      os.close(directory)
    self._raise_walls()

  def _raise_walls(self) -> None:
    request, walls = self._request, self._walls
    with contextlib.suppress(OSError):
      file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
      os.write(file, b"1000")
      os.close(file)
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
      jail.enter_view(walls.view, request["directory"] if self._mount is None else self._mount)
      request["directory"] = jail.BOX
    else:
      os.chdir(request["directory"])
    if request["uid"] is not None:
      jail.become(request["uid"])
      jail.die_with_parent(signal.SIGKILL)  # a change of user forgets it
    jail.no_new_privileges()
    for rules in self._rules:
      jail.restrict_files(rules, request["directory"])
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


def _next_order(control: socket.socket) -> _Order | None:
  """The next run; None when the host is gone. One of all watchers gets each."""
  message, fds, _, _ = socket.recv_fds(control, 1 << 16, 4)
  if not message:
    return None
  order = json.loads(message)
  connection, directory, *inputs = fds
  return _Order(
    order["session"], order["limits"], socket.socket(fileno=connection), directory, inputs
  )


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


_scratch = memoryview(bytearray(1 << 16))
_scratch_used = 0


def _read_some(fd: int, output: measure.Output) -> bool:
  """Reads once; False at the end of the pipe."""
  global _scratch_used
  try:
    count = os.readv(fd, [_scratch])
  except BlockingIOError:
    return True
  _scratch_used = max(_scratch_used, count)
  output.add(_scratch[:count])
  return count > 0


def _wipe_scratch() -> None:
  global _scratch_used
  _scratch[:_scratch_used] = bytes(_scratch_used)
  _scratch_used = 0


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
    keeper = _fork_keeper(walls, settings)
    sys.path.extend(settings["packages_path"])
    tempfile.tempdir = settings["directory"]  # some packages cannot be loaded without one
    for name in (*_COMMON, *settings["packages"]):
      importlib.import_module(name)
    tempfile.tempdir = None  # each program has its own
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
      "own_disks": walls.own_disks,
    }
  except BaseException:
    control.sendall(json.dumps({"error": traceback.format_exc()}).encode())
    return
  control.sendall(json.dumps(hello).encode())
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to handle
  namespace = _prepare_python()
  gc.collect()
  gc.freeze()  # the collector would touch, and so copy, many pages in each fork
  gc.disable()
  watcher = Watcher(walls, (space, resident), namespace)
  _keep_watchers(control, watcher, settings["spare"], keeper)


def _prepare_python() -> dict[str, Any]:
  """What ``programs.prepare_python`` does, once for all programs, and hides our modules."""
  null, (reader, pipe) = os.open(os.devnull, os.O_WRONLY), os.pipe()
  for fd in (1, 2):
    os.dup2(pipe, fd)  # streams note whether they can seek, and theirs will be pipes
  namespace = programs.prepare_python()
  for fd in (1, 2):
    os.dup2(null, fd)
  for fd in (null, reader, pipe):
    os.close(fd)
  for name in [name for name in sys.modules if name.partition(".")[0] == "agentjax"]:
    del sys.modules[name]
  return namespace


_own: set[int] = set()  # children of this process that it forked itself


def _fork_keeper(walls: Walls, settings: dict[str, Any]) -> int | None:
  """The process that makes the boxes' disks, where they have any; this one cannot reach it."""
  if settings["disks"] is None:
    return None
  pid = os.fork() if walls.own_disks else None
  if pid == 0:
    try:
      jail.die_with_parent(signal.SIGKILL)
      jail.be_readable(value=False)
      os.close(0)  # the watchers' socket
      disks.keep(socket.socket(fileno=settings["disks"]), settings["directory"])
    finally:
      os._exit(0)
  os.close(settings["disks"])
  if pid is not None:
    _own.add(pid)
  return pid


def _keep_watchers(
  control: socket.socket, watcher: Watcher, wanted: int, keeper: int | None
) -> None:
  """Keeps ``wanted`` watchers standing by until the host closes ``control`` and all have ended.

  While one tidies up after its run its place has the next, so twice as many again may come free;
  what comes free beyond that ends. Also ends when the ``keeper`` has: the host then starts this
  interpreter again.
  """
  jail.adopt_orphans()
  news, news_write = os.pipe()
  os.set_blocking(news, False)
  room, room_write = os.pipe()  # a byte for each watcher more that may stand by
  os.set_blocking(room, False)
  os.write(room_write, bytes(3 * wanted))
  poll = select.poll()
  poll.register(news, select.POLLIN)
  poll.register(control, select.POLLRDHUP)
  every: dict[int, int] = {}  # process ids by number
  spare: set[int] = set()  # numbers of those that wait for a run
  numbers = itertools.count()
  quiet = False  # nothing came for a while: whoever took a place and did not say so is dead
  while True:
    while len(spare) < wanted and (_take_place(room) or quiet):
      number = next(numbers)
      try:
        every[number] = _fork_watcher(control, watcher, news_write, room, number)
      except OSError:
        os.write(room_write, bytes(1))
        time.sleep(0.05)  # no process to be had; the runs in progress will free some
        break
      spare.add(number)
    events = poll.poll(1000)
    if any(fd == control.fileno() for fd, _ in events):
      break
    quiet, left = not events, 0
    if events:
      for number, free in struct.iter_unpack("=i?", os.read(news, 5 * 512)):
        if free:
          spare.add(number)
        elif number in spare:
          spare.remove(number)
          left += 1
    if ended := set(_reap_watchers()):
      every = {number: pid for number, pid in every.items() if pid not in ended}
    dead = spare - every.keys()
    spare -= dead
    os.write(room_write, bytes(left + len(dead)))
    if keeper in ended:
      break
  # Each ends with its socket. Waited for, because not every machine's first process reaps.
  deadline = time.monotonic() + _LEAVE_SECONDS
  while measure.children("self") and time.monotonic() < deadline + _LEAVE_SECONDS:
    _reap_watchers()
    if time.monotonic() >= deadline:
      for victim in measure.descendants("self"):
        measure.kill(victim)
    time.sleep(0.002)


def _reap_watchers() -> list[int]:
  """Process ids of the children that ended. What a watcher that died by force left is killed."""
  ended = []
  with contextlib.suppress(ChildProcessError):
    while (child := os.waitpid(-1, os.WNOHANG))[0] != 0:
      ended.append(child[0])
      _own.discard(child[0])
      if os.WIFSIGNALED(child[1]):
        for orphan in set(measure.children("self")) - _own:
          for victim in (orphan, *measure.descendants(orphan)):
            measure.kill(victim)
  return ended


def _take_place(room: int) -> bool:
  """Whether there was a byte in ``room``, which is then gone."""
  try:
    return len(os.read(room, 1)) == 1
  except BlockingIOError:
    return False


def _fork_watcher(
  control: socket.socket, watcher: Watcher, news: int, room: int, number: int
) -> int:
  pid = watcher.fork()
  if pid:
    _own.add(pid)
    return pid
  code = 1
  try:
    os.setsid()
    if os.getpid() == 1:  # all that it watches dies with it, so it may die with the zygote
      jail.die_with_parent(signal.SIGKILL)
    watcher.serve(control, news, room, number)
    code = 0
  finally:
    os._exit(code)
