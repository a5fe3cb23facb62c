"""The embedded back end: jailed processes of this machine, without privileges and without Docker.

One small interpreter (``zygote``) is started beside the trainer, never forked from it; each run is
a fork of that interpreter, jailed by what the kernel grants and ended with all its descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import site
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from agentjax.config import FilePath
from agentjax.places import Places, QueueTimeout
from agentjax.sandbox import files as sandbox_files
from agentjax.sandbox.box import ExclusiveBox
from agentjax.sandbox.config import LocalSandboxConfig
from agentjax.sandbox.disks import Disk
from agentjax.sandbox.interface import (
  Capabilities,
  Program,
  Protection,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  as_request,
)
from agentjax.sandbox.result import Ended, Kept, as_result, infra_error

_log = logging.getLogger(__name__)

# Bare packages in place of ours: their __init__ would load more than the sandbox needs.
_BOOT = """
import json, sys, types
for name, folder in json.loads(sys.argv[1]).items():
  package = types.ModuleType(name)
  package.__path__ = [folder]
  sys.modules[name] = package
from agentjax.sandbox import zygote
zygote.main(json.loads(sys.argv[2]))
"""
_START_SECONDS = 60.0  # loading packages may be slow on a cold disk
_GRACE_SECONDS = 10.0  # for the watcher to end a run after its deadline
_SNAPSHOT_BYTES = 256 * 2**20
_TASKS_OF_SESSION = 4  # processes that a box's session keeps between cells


@dataclasses.dataclass(unsafe_hash=True)
class ProcessSandboxConfig(LocalSandboxConfig):
  """Settings of the embedded back end; the figures are ours.

  Attributes:
    limits, concurrency, queue_seconds, require, allow_unisolated: see LocalSandboxConfig.
    packages: packages of this environment that programs may import beyond the standard library;
      loaded once at start, so that a run finds them ready.
    disk: "memory" gives each box a file system of its own in memory, where the machine grants that:
      it can hold ``limits.disk_bytes`` and ``limits.files`` beyond what it was given, never more.
      It takes the machine's memory, for all boxes that are open, and only as much as they hold.
      "directory" puts files on the disk and ends a run that is seen to hold more.
    cgroup: a folder of the group file system (cgroup v2), delegated to this user with the
      controllers memory and pids, in which nothing else lives; each run then has a group below it
      that bounds its memory of every kind. None: processes are measured. See docs/security.md.
    directory: where work directories are made; None is the system's temporary directory.
  """

  packages: tuple[str, ...] = ()
  disk: Literal["memory", "directory"] = "memory"
  cgroup: FilePath | None = None
  directory: FilePath | None = None

  def with_packages(self, packages: tuple[str, ...]) -> Self:
    return dataclasses.replace(self, packages=tuple(dict.fromkeys([*self.packages, *packages])))

  def build(self) -> Sandbox:
    return ProcessSandbox(self)


class ProcessSandbox:
  """Runs programs in jailed processes of this machine; Linux only. See the Sandbox protocol.

  May be used from one event loop after another, and from several tasks at once.
  """

  capabilities = Capabilities(files=True, snapshot=True, commands=True, sessions=True)

  def __init__(self, config: ProcessSandboxConfig | None = None):
    self.config = config or ProcessSandboxConfig()
    self.config.validate("sandbox")
    self._zygote: _Zygote | None = None
    self._starting = threading.Lock()
    self.boxes: set[ProcessBox] = set()
    self.places = Places(self.config.concurrency, self.config.queue_seconds)

  @property
  def protections(self) -> frozenset[Protection]:
    """What was probed to hold; empty before the start."""
    return self._zygote.protections if self._zygote is not None else frozenset()

  @property
  def mechanisms(self) -> tuple[str, ...]:
    """By what, on this machine; empty before the start."""
    return tuple(self._zygote.mechanisms) if self._zygote is not None else ()

  async def start(self) -> frozenset[Protection]:
    return (await self.ready()).protections

  async def create(self, snapshot: bytes | None = None) -> ProcessBox:
    zygote = await self.ready()
    box = ProcessBox(self, zygote, len(snapshot or b""))
    self.boxes.add(box)
    if snapshot is not None:
      try:
        await asyncio.to_thread(box.unpack, snapshot)
      except BaseException:
        await box.close()
        raise
    return box

  async def close(self) -> None:
    for box in list(self.boxes):
      await box.close()
    if self._zygote is not None:
      self._zygote.end()
      self._zygote = None

  async def ready(self) -> _Zygote:
    if self._zygote is None or not self._zygote.alive:
      await asyncio.to_thread(self._start)
    assert self._zygote is not None
    return self._zygote

  def _start(self) -> None:
    with self._starting:
      if self._zygote is not None and self._zygote.alive:
        return
      if self._zygote is not None:
        _log.warning("the sandbox's interpreter ended unexpectedly and is started again")
        self._zygote.release()
      zygote = _Zygote(self.config)
      try:
        mechanisms = ", ".join(zygote.mechanisms)
        self.config.check_protections(zygote.protections, "the embedded sandbox", mechanisms)
      except SandboxError:
        zygote.end()
        raise
      self._zygote = zygote


class ProcessBox(ExclusiveBox):
  """A work directory and its runs; made by ``ProcessSandbox.create``. See the Box protocol."""

  def __init__(self, sandbox: ProcessSandbox, zygote: _Zygote, snapshot_bytes: int):
    super().__init__("embedded")
    self._sandbox = sandbox
    self.uid = zygote.spare_uid()
    self._files: Disk | _Folder
    if (disks := zygote.disks) is not None:
      limits = sandbox.config.limits
      # A file of one byte takes two blocks of 512 in a snapshot, and a page of memory.
      most = snapshot_bytes * os.sysconf("SC_PAGESIZE") // 1024
      room = limits.disk_bytes + most, limits.files + snapshot_bytes // 512
      self._files = Disk(disks, self.uid, room)
    else:
      self._files = _Folder(zygote.directory, self.uid)
    self._zygote = zygote  # its directory lives as long as its boxes
    self._connection: socket.socket | None = None
    self.open_session: ProcessSession | None = None

  async def exec(
    self,
    program: Program,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits | None = None,
  ) -> SandboxResult:
    limits = limits or self._sandbox.config.limits
    async with self.turn(), contextlib.AsyncExitStack() as held:
      if self.open_session is not None:
        raise SandboxError("a session is open in this box; close it, or run its cells")
      if (full := await self.wait_for_place(held)) is not None:
        return full
      watcher = await self.new_run(as_request(program), limits, stdin, files or {})
      if watcher is None:
        return infra_error("the sandbox's interpreter is gone")
      return (await self.converse(watcher, b"", limits)).result

  async def session(self, *, limits: SandboxLimits | None = None) -> ProcessSession:
    async with self.turn():
      if self.open_session is not None:
        raise SandboxError("a session is open in this box; close it before you open another")
      self.open_session = ProcessSession(self, limits or self._sandbox.config.limits)
      return self.open_session

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    async with self.turn():
      return await asyncio.to_thread(lambda: sandbox_files.read_file(self._root(), path, max_bytes))

  async def snapshot(self) -> bytes:
    async with self.turn():
      if self.open_session is not None:
        raise SandboxError("a session is open in this box, and its names are in no snapshot")
      return await asyncio.to_thread(lambda: sandbox_files.pack(self._root(), _SNAPSHOT_BYTES))

  async def _interrupt(self) -> None:
    self.stop_run()

  async def _wipe(self) -> None:
    if self.open_session is not None:
      await self.open_session.end()
    self._sandbox.boxes.discard(self)
    if not self._files.drop():
      await asyncio.to_thread(sandbox_files.wipe, self._files.path)

  async def _put(self, path: str, content: bytes) -> None:
    await asyncio.to_thread(self._write, {path: content})

  def _root(self) -> str:
    """A path to the files. Raises SandboxError: they are gone with the interpreter."""
    try:
      return self._files.root()
    except OSError as error:
      raise SandboxError(f"the box's files cannot be reached: {error}") from error

  def _write(self, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
      sandbox_files.write_file(self._root(), path, content, self.uid)

  def unpack(self, snapshot: bytes) -> None:
    sandbox_files.unpack(self._root(), snapshot, self.uid)

  def stop_run(self) -> None:
    """Ends what runs now, without waiting for its end."""
    if self._connection is not None:
      self._connection.shutdown(socket.SHUT_WR)  # the watcher takes it as "stop"

  async def wait_for_place(self, held: contextlib.AsyncExitStack) -> SandboxResult | None:
    """Takes one of the places for runs; what to answer when none gets free in time."""
    try:
      await held.enter_async_context(self._sandbox.places.one())
    except QueueTimeout as error:
      return infra_error(str(error), "queue")
    return None

  async def new_run(
    self,
    program: dict[str, Any],
    limits: SandboxLimits,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
  ) -> socket.socket | None:
    """The socket to a watcher that was given the run; None when there is none to be had."""
    zygote = await self._sandbox.ready()
    files = files or {}
    bounds = limits.to_dict()
    request = {
      "program": program,
      "limits": bounds,
      "directory": self._files.path,
      "uid": self.uid,
      "tasks_of_user": zygote.tasks_of_user + _TASKS_OF_SESSION * len(self._sandbox.boxes),
    }
    order = {"session": program["kind"] == "session", "limits": bounds}
    try:
      directory = self._files.begin(limits, files)
    except OSError as error:
      self._zygote.hung_up |= isinstance(error, ConnectionError)
      return None
    try:
      if files:
        await asyncio.to_thread(self._write, files)
      return zygote.new_run(order, directory, json.dumps(request).encode(), stdin)
    finally:
      os.close(directory)

  async def converse(self, connection: socket.socket, cell: bytes, limits: SandboxLimits) -> _Reply:
    """Sends a session's cell and waits for the reply; closes ``connection`` unless it goes on."""
    self._connection = connection
    keep = ended = False
    try:
      reply = _read_reply(await _exchange(connection, cell, limits.wall_seconds), limits)
      ended = True  # the watcher answers only when all of the run is dead, or at rest
      keep = reply.alive
      return reply
    except TimeoutError:
      return _Reply(infra_error("the watcher did not end the run in time"))
    except (EOFError, OSError) as error:
      return _Reply(infra_error(f"the watcher ended without a result ({error or 'closed'})"))
    finally:
      self._connection = None
      if not ended:
        await _hang_up(connection)
      elif not keep:
        connection.close()


class _Folder:
  """A box's files in a directory of this machine. The same methods as ``Disk``."""

  def __init__(self, parent: str, uid: int | None):
    self.path = tempfile.mkdtemp(prefix="box-", dir=parent)
    if uid is not None:
      os.chown(self.path, uid, uid)

  def root(self) -> str:
    """The directory, open to us again whatever mode a program of our own user gave it."""
    os.chmod(self.path, 0o700)
    return self.path

  def begin(self, limits: SandboxLimits, files: Mapping[str, bytes]) -> int:
    """A descriptor by which a run's watcher measures the files."""
    return os.open(self.root(), os.O_PATH | os.O_DIRECTORY)

  def drop(self) -> bool:
    """Removes it if it is empty; whether nothing is left."""
    try:
      os.rmdir(self.path)
    except OSError:
      return False
    return True


class ProcessSession:
  """An interpreter that lives from cell to cell; made by ``ProcessBox.session``. See Session.

  Between cells it is stopped and holds no place among the runs, but its memory.
  """

  def __init__(self, box: ProcessBox, limits: SandboxLimits):
    self._box, self._limits = box, limits
    self._connection: socket.socket | None = None  # to the watcher of the interpreter, when idle
    self._alive = self._used = self._closed = False

  @property
  def alive(self) -> bool:
    return self._alive

  async def run(
    self, source: str, *, seed: int = 0, wall_seconds: float | None = None
  ) -> SandboxResult:
    limits = self._limits
    if wall_seconds is not None:
      limits = dataclasses.replace(limits, wall_seconds=wall_seconds)
    cell = {"source": source, "seed": seed, "wall_seconds": limits.wall_seconds}
    async with self._box.turn(), contextlib.AsyncExitStack() as held:
      if self._closed:
        raise SandboxError("the session is closed; open another with Box.session()")
      if (full := await self._box.wait_for_place(held)) is not None:
        return full
      encoded = json.dumps(cell).encode()
      for _ in range(2):  # the machine may have taken the memory of one that waited
        restarted = self._used and not self._alive
        reply = await self._ask(encoded)
        if not reply.gone:
          break
      return dataclasses.replace(reply.result, restarted=restarted)

  async def close(self) -> None:
    if self._closed:
      return
    self._closed = True
    if self._box.open_session is self:
      self._box.stop_run()
    async with self._box.busy:
      await self.end()
      if self._box.open_session is self:
        self._box.open_session = None

  async def _ask(self, cell: bytes) -> _Reply:
    connection, self._connection = self._connection, None
    self._alive = False
    if connection is None:
      connection = await self._box.new_run({"kind": "session"}, self._limits)
      if connection is None:
        return _Reply(infra_error("the sandbox's interpreter is gone"))
    self._used = True
    wall = json.loads(cell)["wall_seconds"]
    limits = dataclasses.replace(self._limits, wall_seconds=wall)
    reply = await self._box.converse(connection, cell, limits)
    if reply.alive:
      self._connection, self._alive = connection, True
    return reply

  async def end(self) -> None:
    """Ends the interpreter; the box is held."""
    connection, self._connection = self._connection, None
    self._alive = False
    if connection is not None:
      await _hang_up(connection)


class _Zygote:
  """The interpreter process that runs are forked from, and its control socket."""

  def __init__(self, config: ProcessSandboxConfig):
    if sys.platform != "linux":
      raise SandboxError(
        f"ProcessSandbox needs Linux, this is {sys.platform}; run in a Linux container, or use "
        "tools that need no sandbox"
      )
    group = None if config.cgroup is None else _opened_group(config.cgroup)
    self.directory = tempfile.mkdtemp(prefix="agentjax-sandbox-", dir=config.directory)
    os.chmod(self.directory, 0o711)
    self._wiped = weakref.finalize(self, _wipe_quietly, self.directory)
    self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._requests, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    interpreter = getattr(sys, "_base_executable", None) or sys.executable
    # Not all of sys.path: it may name the project, whose files hold tasks and their answers.
    packages_path = site.getsitepackages() if config.packages else []
    packages_path = [p for p in packages_path if os.path.isdir(p)]
    passed = [keeper.fileno()] if config.disk == "memory" else []
    passed += [] if group is None else [group]
    settings = {
      "directory": self.directory,
      "disks": keeper.fileno() if config.disk == "memory" else None,
      "group": group,
      "readable": sorted({sys.base_prefix, os.path.dirname(os.__file__), *packages_path}),
      "packages": config.packages,
      "spare": config.concurrency,
      "packages_path": packages_path,
    }
    here = os.path.dirname(os.path.abspath(__file__))
    packages = {"agentjax": os.path.dirname(here), "agentjax.sandbox": here}
    try:
      self._process = subprocess.Popen(
          [interpreter, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _BOOT,
           json.dumps(packages), json.dumps(settings)],
          stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
          cwd="/", env=environment(interpreter), start_new_session=True,
          pass_fds=passed,
      )  # fmt: skip
    except OSError as error:
      raise SandboxError(f"cannot start the interpreter {interpreter}: {error}") from error
    finally:
      theirs.close()
      keeper.close()
      if group is not None:
        os.close(group)
    hello = self._hello()
    self._requests.settimeout(_GRACE_SECONDS)
    self.disks = self._requests if hello["own_disks"] else None  # to their keeper
    self.protections = frozenset(Protection(name) for name in hello["protections"])
    self.mechanisms: list[str] = hello["mechanisms"]
    self._first_uid, self._uids = hello["uids"]
    self.tasks_of_user = _tasks_of_user() + 256  # the trainer may start more threads later
    self.hung_up = False  # it closed a socket: it is about to end

  @property
  def alive(self) -> bool:
    return self._process.poll() is None and not self.hung_up

  def spare_uid(self) -> int | None:
    """A user id for one box, or None where programs keep ours."""
    return self._first_uid + secrets.randbelow(self._uids) if self._uids else None

  def new_run(
    self, order: dict[str, Any], directory: int, request: bytes, stdin: bytes
  ) -> socket.socket | None:
    """Hands a run to a watcher; returns the socket to it, or None when the interpreter is gone.

    The watcher reads the ``order`` alone: request and stdin are files that it passes on, as is
    ``directory``, from ``begin``.
    """
    ours, theirs = socket.socketpair()
    fds = [theirs.fileno(), directory]
    try:
      fds.append(_sealed(request))
      if stdin:
        fds.append(_sealed(stdin))
      socket.send_fds(self._control, [json.dumps(order).encode()], fds)
    except OSError as error:
      self.hung_up |= isinstance(error, ConnectionError)
      ours.close()
      return None
    finally:
      theirs.close()
      for fd in fds[2:]:
        os.close(fd)
    ours.setblocking(False)
    return ours

  def release(self) -> None:
    """Lets go of the sockets, at which the interpreter, its watchers and the keeper end."""
    self._control.close()
    self._requests.close()

  def end(self) -> None:
    self.release()
    try:
      self._process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._wiped()

  def _hello(self) -> dict[str, Any]:
    self._control.settimeout(_START_SECONDS)
    try:
      message = self._control.recv(1 << 16)
      hello = json.loads(message) if message else {"error": "it ended at once"}
    except OSError as error:
      hello = {"error": str(error)}
    self._control.setblocking(False)  # one that takes no runs must not hold up the event loop
    if "error" in hello:
      self._process.kill()
      self.end()
      raise SandboxError(f"the sandbox's interpreter did not start: {hello['error']}")
    return hello


def _opened_group(path: str) -> int:
  """A descriptor of the folder of groups; its mount may be written to, unlike the interpreter's."""
  try:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  except OSError as error:
    raise SandboxError(
      f"sandboxes.NAME.cgroup={path!r} cannot be opened: {error.strerror}; name a folder below "
      "/sys/fs/cgroup that is delegated to this user, or None"
    ) from error


def _sealed(content: bytes) -> int:
  """A descriptor of a file in memory, at its start, that nobody can change."""
  fd = os.memfd_create("run", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  with open(fd, "wb", closefd=False) as file:
    file.write(content)
  fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def environment(interpreter: str) -> dict[str, str]:
  """All that programs see of an environment, besides HOME, TMPDIR and PWD."""
  return {
    "PATH": f"{os.path.dirname(interpreter)}:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program prints the same sets
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
  }


def _wipe_quietly(directory: str) -> None:
  with contextlib.suppress(OSError):
    sandbox_files.wipe(directory)


def _tasks_of_user() -> int:
  """Threads of all processes of this user, which the kernel counts where no namespace does."""
  count = 0
  for entry in os.scandir("/proc"):
    with contextlib.suppress(OSError):
      if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
        count += len(os.listdir(f"/proc/{entry.name}/task"))
  return count


async def _exchange(connection: socket.socket, cell: bytes, seconds: float) -> bytes:
  """Sends a cell, if any, and waits for the result."""
  loop = asyncio.get_running_loop()
  async with asyncio.timeout(seconds + _GRACE_SECONDS):
    if cell:
      await loop.sock_sendall(connection, struct.pack("<Q", len(cell)) + cell)
    length = struct.unpack("<Q", await _receive_exactly(connection, 8))[0]
    return await _receive_exactly(connection, length)


async def _receive_exactly(connection: socket.socket, count: int) -> bytes:
  loop = asyncio.get_running_loop()
  parts = bytearray()
  while len(parts) < count:
    part = await loop.sock_recv(connection, count - len(parts))
    if not part:
      raise EOFError
    parts += part
  return bytes(parts)


async def _hang_up(connection: socket.socket) -> None:
  """Tells the watcher to stop and waits until all of the run is dead; survives cancellation."""

  async def wait_for_end() -> None:
    try:
      connection.shutdown(socket.SHUT_WR)
      async with asyncio.timeout(_GRACE_SECONDS):
        while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
          pass
    except (OSError, TimeoutError):
      pass  # it is gone already, or will never go
    finally:
      connection.close()

  await asyncio.shield(asyncio.ensure_future(wait_for_end()))


class _Reply(NamedTuple):
  """What a watcher answered: the result, and whether the interpreter lives on or never ran it."""

  result: SandboxResult
  alive: bool = False
  gone: bool = False


def _read_reply(frame: bytes, limits: SandboxLimits) -> _Reply:
  at = 4 + struct.unpack("<I", frame[:4])[0]
  header = json.loads(frame[4:at])
  parts = []
  for size in header["sizes"]:
    parts.append(frame[at : at + size])
    at += size
  reason, detail = header["reason"], header["detail"]
  gone = reason == "gone"
  ended = Ended(
    "setup" if gone else reason,
    detail or "the interpreter ended before the cell ran" if gone else detail,
    header["exit_code"],
    header["seconds"],
    Kept(parts[0], parts[1], header["totals"][0]),
    Kept(parts[2], parts[3], header["totals"][1]),
    header["cpu_seconds"],
  )
  return _Reply(as_result(ended, limits), alive=header["alive"] and not gone, gone=gone)
