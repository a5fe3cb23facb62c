"""Programs in Docker or Podman containers, with gVisor where the engine has it.

A box is one container: no network, read-only image, no capabilities, a work directory in memory.
Its first process only waits; each run is an ``exec`` in it as another user, after which every
process of that user is killed, so that nothing lasts from run to run but files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from typing import Annotated

from agentjax.adapters.sandboxes import archive, guest, probe
from agentjax.adapters.sandboxes.local import SNAPSHOT_BYTES, LocalBox, LocalSandbox
from agentjax.adapters.sandboxes.supervise import supervise, surely
from agentjax.config import PositiveFloat, Range, check
from agentjax.sandbox.config import LocalSandboxConfig
from agentjax.sandbox.files import checked_parts
from agentjax.sandbox.interface import (
  Command,
  Program,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  as_request,
)
from agentjax.sandbox.result import Ended, as_result, infra_error

_log = logging.getLogger(__name__)
_WORK = "/work"
_HOST_LABEL = "agentjax.host"
_ENGINE_TASKS = 32  # room for the engine's own processes and threads, so that a sweep gets in
_KEEPER = 65534  # user of the first process
_USERS = (20_000, 40_000)  # first and count of the programs' users; also rootless engines map these
_OWN_FAULT = 125  # exit code of an engine's client for its own failures
# Kills all but itself of the programs' user; then says how often the kernel ran out of memory.
_SWEEP = (
  "kill -9 -1 2>/dev/null; "
  "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; "
  "echo swept"
)


@dataclasses.dataclass(unsafe_hash=True)
class ContainerConfig(LocalSandboxConfig):
  """Settings of the Docker and Podman back ends; the figures are ours.

  Attributes:
    engine: the client's program, a name in PATH or a path.
    image: must be present (it is never pulled) and have sh, sleep, tar, and Python for Python code.
    runtime: OCI runtime, for example "runsc" for gVisor; None is the engine's default.
    python: the image's interpreter, Python 3.8 or later.
    limits: bounds of a run. Memory, processes and disk_bytes bound the container, so a run's own
      limits may differ from these only in the other fields. The work directory is held in memory,
      beyond memory_bytes; the number of files is bounded only by the memory that they take.
    cpus: CPU cores a container may use; None is all.
    concurrency, queue_seconds, require, allow_unisolated: see LocalSandboxConfig.
    engine_seconds: longest time for one command to the engine, runs aside.
    lifetime_seconds: a container ends by itself after this, should nobody remove it.
    arguments: further arguments of the engine's ``run``.
  """

  engine: str = "docker"
  image: str = "python:3.11-slim"
  runtime: str | None = None
  python: str = "python3"
  cpus: PositiveFloat | None = None
  engine_seconds: PositiveFloat = 60.0
  lifetime_seconds: Annotated[int, Range(60)] = 6 * 3600
  arguments: tuple[str, ...] = ()

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.engine != "", f"{path}.engine", self.engine, "docker, podman or a path")
    check(self.image != "", f"{path}.image", self.image, "the name of an image")

  def build(self) -> Sandbox:
    return ContainerSandbox(self)


def run_command(config: ContainerConfig, limits: SandboxLimits, name: str) -> list[str]:
  """The argument list that starts the container ``name``."""
  memory = str(limits.memory_bytes + limits.disk_bytes)
  argv = [config.engine, "run", "--detach", "--rm", "--init", "--pull", "never", "--name", name]
  argv += ["--label", f"{_HOST_LABEL}={socket.gethostname()}"]
  argv += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--ipc", "none"]
  argv += ["--security-opt", "no-new-privileges", "--user", f"{_KEEPER}:{_KEEPER}"]
  argv += ["--pids-limit", str(limits.processes + _ENGINE_TASKS)]
  argv += ["--memory", memory, "--memory-swap", memory]
  if config.cpus is not None:
    argv += ["--cpus", f"{config.cpus:g}"]
  if config.runtime is not None:
    argv += ["--runtime", config.runtime]
  work = f"size={limits.disk_bytes},mode=1777"
  argv += ["--tmpfs", f"{_WORK}:rw,exec,nosuid,nodev,{work}"]
  for key, value in (
    ("HOME", _WORK),
    ("TMPDIR", _WORK),
    ("LANG", "C.UTF-8"),
    ("PYTHONHASHSEED", "0"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("OMP_NUM_THREADS", "1"),
  ):
    argv += ["--env", f"{key}={value}"]
  argv += [*config.arguments, "--workdir", _WORK, "--entrypoint", "sleep", config.image]
  return [*argv, str(config.lifetime_seconds)]


def exec_command(
  engine: str, name: str, user: int, argv: Sequence[str], *, interactive: bool
) -> list[str]:
  """The argument list that runs ``argv`` in the container ``name`` as ``user``."""
  stdin = ["--interactive"] if interactive else []
  return [engine, "exec", *stdin, "--user", f"{user}:{user}", "--workdir", _WORK, name, *argv]


class ContainerSandbox(LocalSandbox[ContainerConfig]):
  """Runs programs in containers of this machine's engine. See the Sandbox protocol."""

  def __init__(self, config: ContainerConfig | None = None):
    super().__init__(config or ContainerConfig())

  async def create(self, snapshot: bytes | None = None) -> ContainerBox:
    await self.start()
    files = None if snapshot is None else archive.normalised(snapshot)
    box = await self._new_box(self.config)
    try:
      if files is not None:
        await box.unpack(files)
    except BaseException:
      await box.close()
      raise
    return box

  async def engine(self, argv: Sequence[str], stdin: bytes = b"", most: int = 2**20) -> bytes:
    """Output of one command to the engine.

    Raises:
      SandboxError: it failed, took longer than engine_seconds, or wrote more than ``most`` bytes.
    """
    seconds = self.config.engine_seconds
    bounds = SandboxLimits(wall_seconds=seconds, output_bytes=most, output_kill_bytes=most)
    ended = await supervise(argv, bounds, stdin=stdin)
    if ended.reason != "exit" or ended.exit_code != 0:
      said = (ended.stderr.head + ended.stderr.tail).decode(errors="replace").strip()[-500:]
      shown = " ".join([os.path.basename(argv[0]), *argv[1:2]])
      raise SandboxError(
        f"{shown} failed: {ended.detail or f'exit code {ended.exit_code}'}. {said}".rstrip()
      )
    return ended.stdout.head + ended.stdout.tail

  async def _start(self) -> None:
    config = self.config
    if shutil.which(config.engine) is None:
      raise SandboxError(
        f"no program {config.engine!r} in PATH: install the container engine, name its client in "
        "the config's engine, or use the embedded back end"
      )
    await self._remove_abandoned()
    limits = probe.limits_of_probe(config.limits)
    box = await self._new_box(dataclasses.replace(config, limits=limits))
    with tempfile.NamedTemporaryFile(prefix=probe.secret_name()) as host_file:
      try:
        self.protections = await probe.probed(box, limits, host_file.name)
      finally:
        await box.close()
    name = f"{os.path.basename(config.engine)} with image {config.image}"
    config.check_protections(self.protections, name)

  async def _remove_abandoned(self) -> None:
    """Removes the containers of processes of this machine that ended without doing so."""
    label = f"label={_HOST_LABEL}={socket.gethostname()}"
    listing = await self.engine(
      [self.config.engine, "ps", "--all", "--filter", label, "--format", "{{.Names}}"]
    )
    for name in listing.decode().split():
      if name.startswith("agentjax-") and not _owner_lives(name):
        _log.warning("removing the container %s, whose process is gone", name)
        with contextlib.suppress(SandboxError):  # another process may be removing it
          await self.engine([self.config.engine, "rm", "--force", name])

  async def _new_box(self, config: ContainerConfig) -> ContainerBox:
    name = f"agentjax-{os.getpid()}-{_started_at(os.getpid())}-{secrets.token_hex(6)}"
    box = ContainerBox(self, config, name)
    self.boxes.add(box)
    try:
      await self.engine(run_command(config, config.limits, name))
    except SandboxError as error:
      await box.close()
      raise SandboxError(
        f"{error}. Is the engine running, and the image present ({config.engine} pull "
        f"{config.image})?"
      ) from error
    except BaseException:
      await box.close()
      raise
    return box


@dataclasses.dataclass(frozen=True)
class _Swept:
  said: str | None  # None: the container could not be swept
  running: bool  # whether it was still there


class ContainerBox(LocalBox):
  """One container; made by ``ContainerSandbox.create``. See the Box protocol."""

  def __init__(self, sandbox: ContainerSandbox, config: ContainerConfig, name: str):
    super().__init__("container", sandbox.places, config.limits)
    self._sandbox, self._config, self.name = sandbox, config, name
    self._user = _USERS[0] + secrets.randbelow(_USERS[1])
    self._lost = False
    self._out_of_memory = 0  # how often so far

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    inside = "/".join(checked_parts(path))
    async with self.turn():
      try:
        # An archive holds 10 KiB beyond its one file at most.
        held = await self._inside(
          ["tar", "-c", "-f", "-", "-C", _WORK, "--", inside], most=max_bytes + 2**16
        )
      except SandboxError as error:
        raise SandboxError(
          f"cannot read {path!r} in the sandbox, or it has more than {max_bytes} bytes "
          f"(max_bytes): {error}"
        ) from error
    return archive.content_of(held, path, max_bytes)

  async def snapshot(self) -> bytes:
    async with self.turn():
      argv = ["tar", "-c", "-f", "-", "-C", _WORK, "."]
      return archive.normalised(await self._inside(argv, most=SNAPSHOT_BYTES))

  async def _interrupt(self) -> None:
    await surely(self._remove())  # also ends a run in progress

  async def _wipe(self) -> None:
    self._sandbox.boxes.discard(self)

  async def _put_all(self, files: Mapping[str, bytes]) -> None:
    await self.unpack(archive.of_files(files))

  def _check(self, program: Program, limits: SandboxLimits) -> None:
    as_request(program)
    for name in ("memory_bytes", "processes", "disk_bytes"):
      asked, given = getattr(limits, name), getattr(self._config.limits, name)
      if asked != given:
        raise SandboxError(
          f"{name}={asked} of a run must be the container's ({given}), bounded as a whole; "
          "change ContainerConfig.limits"
        )

  def _check_open(self) -> None:
    super()._check_open()
    if self._lost:
      raise SandboxError("this box's container is gone with its files; open another")

  async def _run(self, program: Program, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
    argv: Sequence[str]
    if isinstance(program, Command):
      argv = program.argv
    else:
      argv = [self._config.python, *guest.BOOT_ARGUMENTS]
      stdin = guest.framed(guest.plain(program), stdin)
    command = self._command(guest.limited(argv, limits), stdin)
    swept = _Swept(None, running=True)

    async def sweep() -> None:
      nonlocal swept
      swept = await self._sweep()

    try:
      ended = await supervise(command, limits, stdin=stdin)
    finally:
      await surely(sweep())
    if self._closed:
      ended = dataclasses.replace(ended, reason="cancelled", detail="the box was closed")
    elif ended.reason == "exit" and swept.said is None and swept.running:
      detail = "it had to be ended with its container: that had no process left to sweep it"
      ended = dataclasses.replace(ended, reason="processes", detail=detail)
    elif ended.reason == "exit" and (swept.said is None or ended.exit_code == _OWN_FAULT):
      return infra_error(f"the engine could not run it: {_last_line(ended)}")
    result = as_result(_with_signal(ended), limits)
    if self._ran_out_of_memory(swept) and result.status is RunStatus.KILLED:
      detail = f"needs more than {limits.memory_bytes} bytes of memory"
      return dataclasses.replace(result, status=RunStatus.MEMORY_LIMIT, detail=detail)
    return result

  async def _sweep(self) -> _Swept:
    """Kills what the run left, or else removes the container."""
    with contextlib.suppress(SandboxError):  # full of processes, or gone
      said = (await self._inside(["sh", "-c", _SWEEP])).decode(errors="replace")
      if said.endswith("swept\n"):
        return _Swept(said, running=True)
    running = False
    with contextlib.suppress(SandboxError):
      await self._sandbox.engine([self._config.engine, "inspect", self.name])
      running = True
    self._lost = True
    await self._remove()
    return _Swept(None, running)

  def _ran_out_of_memory(self, swept: _Swept) -> bool:
    lines = [line.split() for line in (swept.said or "").splitlines()]
    count = sum(int(line[1]) for line in lines if line[:1] == ["oom_kill"])
    before, self._out_of_memory = self._out_of_memory, count
    return count > before

  async def _inside(self, argv: Sequence[str], stdin: bytes = b"", most: int = 2**20) -> bytes:
    return await self._sandbox.engine(self._command(argv, stdin), stdin, most)

  def _command(self, argv: Sequence[str], stdin: bytes) -> list[str]:
    engine, user = self._config.engine, self._user
    return exec_command(engine, self.name, user, argv, interactive=bool(stdin))

  async def unpack(self, files: bytes) -> None:
    await self._inside(["tar", "-x", "-f", "-", "-C", _WORK], stdin=files)

  async def _remove(self) -> None:
    with contextlib.suppress(SandboxError):  # it may never have started, or have ended
      await self._sandbox.engine([self._config.engine, "rm", "--force", self.name])


@dataclasses.dataclass(unsafe_hash=True)
class PodmanConfig(ContainerConfig):
  """For Podman, which otherwise mounts further writable directories in a read-only container."""

  engine: str = "podman"
  arguments: tuple[str, ...] = ("--read-only-tmpfs=false",)


def _with_signal(ended: Ended) -> Ended:
  """Shells and engines report a signal as 128 plus its number."""
  code = ended.exit_code
  if ended.reason != "exit":
    return dataclasses.replace(ended, exit_code=-9)
  if code is not None and 128 < code <= 192:
    return dataclasses.replace(ended, exit_code=128 - code)
  return ended


def _last_line(ended: Ended) -> str:
  said = (ended.stderr.tail or ended.stderr.head).decode(errors="replace").strip()
  return said.rpartition("\n")[2][-500:] or f"exit code {ended.exit_code}"


def _started_at(pid: int) -> str:
  """The process's start in clock ticks, which tells it from a later one of the same id."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[19]
  except OSError:
    return "0"


def _owner_lives(name: str) -> bool:
  _, pid, started, _ = name.split("-", 3)
  try:
    os.kill(int(pid), 0)
  except ProcessLookupError:
    return False
  except (PermissionError, ValueError):
    return True
  return _started_at(int(pid)) == started
