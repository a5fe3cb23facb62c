"""Programs in a jail that another tool builds: bubblewrap or nsjail, where one is installed.

The tool makes the namespaces and mounts; inside, our own first process sets limits, drops
capabilities, installs the system-call filter of the embedded back end and reaps. A run is over when
the kernel has ended its whole PID namespace.

    host ── exec ──► bwrap | nsjail ── pid 1 (reaps, reports) ── program
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import signal
import site
import sys
import tempfile
from collections.abc import Callable, Mapping

from agentjax.adapters.sandboxes import guest, probe
from agentjax.adapters.sandboxes.local import SNAPSHOT_BYTES, LocalBox, LocalSandbox
from agentjax.adapters.sandboxes.supervise import supervise
from agentjax.config import FilePath, check
from agentjax.sandbox import files as sandbox_files
from agentjax.sandbox import jail, measure
from agentjax.sandbox.config import LocalSandboxConfig
from agentjax.sandbox.interface import (
  Program,
  Protection,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  as_request,
)
from agentjax.sandbox.process import environment
from agentjax.sandbox.result import Ended, as_result

_WORK = "/work"
_UIDS = (1 << 30, 1 << 29)  # first and count of user ids that nobody uses


@dataclasses.dataclass(unsafe_hash=True)
class JailerConfig(LocalSandboxConfig):
  """Settings of the bubblewrap and nsjail back ends; the figures are ours.

  Attributes:
    limits, concurrency, queue_seconds, require, allow_unisolated: see LocalSandboxConfig.
    path: the tool's program; None looks for it in PATH.
    readable: paths of this machine that programs may read, beyond the system's and Python's.
    site_packages: whether programs may import this environment's packages.
    directory: where work directories are made; None is the system's temporary directory.
  """

  path: str | None = None
  readable: tuple[FilePath, ...] = ()
  site_packages: bool = False
  require: tuple[str, ...] = (
    "limits",
    "descendants",
    "network",
    "processes",
    "filesystem",
    "syscalls",
  )
  directory: FilePath | None = None

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in self.readable:
      taken = any(f"{name}/".startswith(f"{t}/") for t in ("/tmp", "/proc", "/dev", _WORK))
      allowed = "absolute paths, none below /tmp, /proc, /dev or /work"
      check(os.path.isabs(name) and not taken, f"{path}.readable", self.readable, allowed)


@dataclasses.dataclass(frozen=True)
class JailCommand:
  """What a tool is asked for.

  Attributes:
    program: path of the tool.
    readable: paths mounted read-only at their own places.
    directory: the work directory, mounted at /work, the only writable place.
    uid: user id of the program, or None for a user namespace that maps this process's user.
    report: file descriptor to pass on.
    seconds: wall clock after which the tool may end the run by itself.
    argv: what to run inside.
  """

  program: str
  readable: tuple[str, ...]
  directory: str
  uid: int | None
  report: int
  seconds: float
  argv: tuple[str, ...]


def bubblewrap_command(command: JailCommand) -> list[str]:
  """The argument list for ``bwrap``.

  With a user id of its own bubblewrap runs without a user namespace, and the first process inside
  changes its user: a namespace made by root would leave the programs root's processes outside.
  """
  argv = [command.program, "--die-with-parent", "--new-session", "--as-pid-1"]
  argv += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
  argv += ["--unshare-cgroup-try", "--hostname", "box"]
  if command.uid is None:
    argv += ["--unshare-user"]
  else:
    argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
  for folder in _ancestors(command.readable):  # bubblewrap would make them as closed as ours are
    argv += ["--perms", "0755", "--dir", folder]
  for path in command.readable:
    if os.path.islink(path):
      argv += ["--symlink", os.readlink(path), path]
    else:
      argv += ["--ro-bind", path, path]
  for device in jail.DEVICES:
    argv += ["--dev-bind", device, device]
  argv += ["--proc", "/proc", "--bind", command.directory, _WORK, "--symlink", _WORK, "/tmp"]
  return [*argv, "--remount-ro", "/", "--chdir", "/", "--", *command.argv]


def nsjail_command(command: JailCommand) -> list[str]:
  """The argument list for ``nsjail``; its limits are off, as the first process inside sets ours."""
  uid = os.getuid() if command.uid is None else command.uid
  gid = os.getgid() if command.uid is None else command.uid
  argv = [command.program, "--mode", "o", "--really_quiet", "--keep_env", "--disable_rlimits"]
  argv += ["--time_limit", str(int(command.seconds) + 1), "--pass_fd", str(command.report)]
  argv += ["--hostname", "box", "--cwd", "/", "--iface_no_lo"]
  argv += ["--user", f"1000:{uid}:1", "--group", f"1000:{gid}:1"]
  for path in command.readable:
    if os.path.islink(path):
      argv += ["--symlink", f"{os.readlink(path)}:{path}"]
    else:
      argv += ["--bindmount_ro", path]
  for device in jail.DEVICES:
    argv += ["--bindmount", device]
  argv += ["--bindmount", f"{command.directory}:{_WORK}", "--symlink", f"{_WORK}:/tmp"]
  return [*argv, "--", *command.argv]


@dataclasses.dataclass(frozen=True)
class Jailer:
  """A tool that builds jails.

  Attributes:
    name: for messages.
    program: looked for in PATH.
    command: its argument list.
    changes_user: whether the tool itself starts the program as ``JailCommand.uid``.
  """

  name: str
  program: str
  command: Callable[[JailCommand], list[str]]
  changes_user: bool


BUBBLEWRAP = Jailer("bubblewrap", "bwrap", bubblewrap_command, changes_user=False)
NSJAIL = Jailer("nsjail", "nsjail", nsjail_command, changes_user=True)


class JailerSandbox(LocalSandbox[JailerConfig]):
  """Runs programs through bubblewrap or nsjail; Linux only. See the Sandbox protocol."""

  def __init__(self, jailer: Jailer, config: JailerConfig | None = None):
    super().__init__(config or JailerConfig())
    self.jailer = jailer
    self._directory: str | None = None
    self._own_users = False
    self.program = ""
    self.readable: tuple[str, ...] = ()
    self.packages: list[str] = []
    self.interpreter = getattr(sys, "_base_executable", None) or sys.executable

  async def create(self, snapshot: bytes | None = None) -> JailerBox:
    await self.start()
    box = self._new_box()
    if snapshot is not None:
      try:
        await asyncio.to_thread(sandbox_files.unpack, box.directory, snapshot, box.uid)
      except BaseException:
        await box.close()
        raise
    return box

  async def close(self) -> None:
    await super().close()
    self._started = False
    if self._directory is not None:
      await asyncio.to_thread(sandbox_files.wipe, self._directory)
      self._directory = None

  async def _start(self) -> None:
    if sys.platform != "linux":
      raise SandboxError(f"{self.jailer.name} needs Linux, this is {sys.platform}")
    program = self.config.path or shutil.which(self.jailer.program)
    if program is None:
      raise SandboxError(
        f"{self.jailer.name} is not installed: no program {self.jailer.program!r} in PATH. Install "
        "it, name it in the config's path, or use the embedded back end."
      )
    self.program = program
    self.packages = site.getsitepackages() if self.config.site_packages else []
    wanted = [*jail.READABLE, sys.base_prefix, os.path.dirname(os.__file__), *self.packages]
    self.readable = _outermost([p for p in (*wanted, *self.config.readable) if os.path.exists(p)])
    self._directory = tempfile.mkdtemp(
      prefix=f"agentjax-{self.jailer.program}-", dir=self.config.directory
    )
    os.chmod(self._directory, 0o711)
    try:
      self.protections = await self._probe()
      self.config.check_protections(self.protections, self.jailer.name)
    except BaseException:
      await self.close()
      raise

  async def _probe(self) -> frozenset[Protection]:
    """Chooses the strongest way that works here, and tries to break out of it."""
    failures = []
    for own_users in (True, False) if os.geteuid() == 0 else (False,):
      self._own_users = own_users
      box = self._new_box()
      host_file = os.path.join(self._directory or "", probe.secret_name())
      with open(host_file, "w") as file:
        file.write("of this machine")
      try:
        limits = probe.limits_of_probe(self.config.limits)
        found = await probe.probed(box, limits, host_file)
        made = os.path.join(box.directory, probe.MADE)
        if os.lstat(made).st_uid != os.geteuid():
          found |= {Protection.USER}
        return found
      except SandboxError as error:
        failures.append(str(error))
      finally:
        os.unlink(host_file)
        await box.close()
    raise SandboxError(f"{self.jailer.name} does not work on this machine: {'; '.join(failures)}")

  def _new_box(self) -> JailerBox:
    assert self._directory is not None
    uid = _UIDS[0] + secrets.randbelow(_UIDS[1]) if self._own_users else None
    box = JailerBox(self, self._directory, uid)
    self.boxes.add(box)
    return box


class JailerBox(LocalBox):
  """A work directory and its runs; made by ``JailerSandbox.create``. See the Box protocol."""

  def __init__(self, sandbox: JailerSandbox, parent: str, uid: int | None):
    super().__init__(sandbox.jailer.name, sandbox.places, sandbox.config.limits)
    self._sandbox = sandbox
    self.uid = uid
    self.directory = tempfile.mkdtemp(prefix="box-", dir=parent)
    if uid is not None:
      os.chown(self.directory, uid, uid)
    self._tool: int | None = None

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    async with self.turn():
      return await asyncio.to_thread(sandbox_files.read_file, self.directory, path, max_bytes)

  async def snapshot(self) -> bytes:
    async with self.turn():
      return await asyncio.to_thread(sandbox_files.pack, self.directory, SNAPSHOT_BYTES)

  async def _interrupt(self) -> None:
    if self._tool is not None:
      _end_jail(self._tool)

  async def _wipe(self) -> None:
    self._sandbox.boxes.discard(self)
    await asyncio.to_thread(sandbox_files.wipe, self.directory)

  async def _put_all(self, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
      await asyncio.to_thread(sandbox_files.write_file, self.directory, path, content, self.uid)

  async def _run(self, program: Program, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
    sandbox = self._sandbox
    report, report_write = os.pipe()
    disk = measure.Disk(self.directory, limits.to_dict())
    try:
      request = {
        "program": as_request(program),
        "limits": limits.to_dict(),
        "directory": _WORK,
        "other_tasks": _other_tasks(self.uid),
        "uid": None if sandbox.jailer.changes_user else self.uid,
        "seccomp": jail.seccomp_known(),
        "paths": sandbox.packages,
        "report": report_write,
      }
      command = JailCommand(
        sandbox.program,
        sandbox.readable,
        self.directory,
        self.uid,
        report_write,
        limits.wall_seconds + 5.0,
        (sandbox.interpreter, "-S", *guest.BOOT_ARGUMENTS),
      )
      ended = await supervise(
        sandbox.jailer.command(command),
        limits,
        stdin=guest.framed(guest.jailed(request), stdin),
        env=environment(sandbox.interpreter),
        pass_fds=(report_write,),
        look=lambda tool: self._look(tool, limits, disk),
        end=_end_jail,
      )
      os.set_blocking(report, False)
      text = ""
      with contextlib.suppress(BlockingIOError):
        text = os.read(report, 4096).decode()
      return as_result(_with_report(ended, text, closed=self._closed), limits)
    finally:
      self._tool = None
      os.close(report)
      os.close(report_write)

  def _look(self, tool: int, limits: SandboxLimits, disk: measure.Disk) -> tuple[str, str] | None:
    self._tool = tool
    if self._closed:
      return "cancelled", "the box was closed"
    first, *family = measure.descendants(tool) or [0]
    interpreter = measure.resident_bytes(first)  # pages that every process of the run starts with
    resident = sum(max(0, measure.resident_bytes(p) - interpreter) for p in family)
    if resident > limits.memory_bytes:
      return "memory", f"its processes hold more than {limits.memory_bytes} bytes together"
    if sum(measure.task_count(p) for p in family) > limits.processes:
      return "processes", f"runs more than {limits.processes} processes and threads"
    if (detail := disk.too_much(family)) is not None:
      return "disk", detail
    return None


def _with_report(ended: Ended, report: str, *, closed: bool) -> Ended:
  """What the first process inside wrote decides; the tool's own exit code only says that it ran."""
  if report.startswith("exit "):
    _, status, cpu = report.split()
    code = os.waitstatus_to_exitcode(int(status))
    return dataclasses.replace(ended, exit_code=code, cpu_seconds=float(cpu))
  if closed:  # perhaps before the first process inside was there to be killed
    ended = dataclasses.replace(ended, reason="cancelled", detail="the box was closed")
  if ended.reason != "exit":
    return dataclasses.replace(ended, exit_code=-signal.SIGKILL)
  said = report.removeprefix("error ") or (ended.stderr.tail or ended.stderr.head).decode(
    errors="replace"
  )
  detail = f"the jail was not built (exit code {ended.exit_code}): {said.strip()[-500:]}"
  return dataclasses.replace(ended, reason="setup", detail=detail)


def _end_jail(tool: int) -> None:
  """Kills the first process of the namespace, and with it all; the tool ends when that is done."""
  for child in measure.children(tool):
    with contextlib.suppress(ProcessLookupError):
      os.kill(child, signal.SIGKILL)


def _other_tasks(uid: int | None) -> int:
  """Tasks that count against the program's limit beside its own."""
  release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
  # Before Linux 5.14 all tasks of this user count; then only what is seen from outside bounds them.
  return 2 if uid is not None or release >= (5, 14) else 1 << 20


def _ancestors(paths: tuple[str, ...]) -> list[str]:
  found = set()
  for path in paths:
    while (path := os.path.dirname(path)) != "/":
      found.add(path)
  return sorted(found)


def _outermost(paths: list[str]) -> tuple[str, ...]:
  """``paths`` without those that lie below another one that is mounted whole."""
  kept: list[str] = []
  for path in sorted({os.path.normpath(p) for p in paths}, key=len):
    inside = any(path.startswith(f"{k}/") and not os.path.islink(k) for k in kept)
    if not inside and path not in kept:
      kept.append(path)
  return tuple(kept)


@dataclasses.dataclass(unsafe_hash=True)
class BubblewrapConfig(JailerConfig):
  """Settings of the bubblewrap back end; see JailerConfig."""

  def build(self) -> Sandbox:
    return JailerSandbox(BUBBLEWRAP, self)


@dataclasses.dataclass(unsafe_hash=True)
class NsjailConfig(JailerConfig):
  """Settings of the nsjail back end; see JailerConfig."""

  def build(self) -> Sandbox:
    return JailerSandbox(NSJAIL, self)
