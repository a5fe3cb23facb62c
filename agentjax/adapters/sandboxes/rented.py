"""Programs in sandboxes that a vendor rents out, through the vendor's own Python SDK.

``Provider`` is the interface to an SDK; ``RentedSandbox`` makes a back end of it. Shell scripts of
ours do the rest inside: each leaves its report in a file, which is read up to a bound. So it does
not matter how an SDK handles outputs.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import importlib
import logging
import math
import secrets
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

from agentjax.adapters.sandboxes import archive, guest
from agentjax.adapters.sandboxes.base import StartedSandbox
from agentjax.adapters.sandboxes.called import CalledBox, InfraError
from agentjax.adapters.sandboxes.supervise import surely
from agentjax.config import PositiveFloat, PositiveInt, check
from agentjax.places import Places, QueueTimeout
from agentjax.sandbox.config import SandboxConfig
from agentjax.sandbox.files import checked_parts
from agentjax.sandbox.interface import (
  BoxContentError,
  Command,
  Program,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  as_request,
)
from agentjax.sandbox.result import Ended, Kept, as_result, infra_error

_log = logging.getLogger(__name__)
Handle = TypeVar("Handle")
_SNAPSHOT_BYTES = 256 * 2**20
_OF_THE_CLOCK = (124, 137, 143)  # exit codes of ``timeout``, which differ from system to system
_REPORT_SECONDS = 20
_COMMAND_CHARACTERS = 20_000  # Linux lets one argument have 128 KiB, quotes and all

# $1: the files of the last script; $2: those of this one; $3: the work directory. No script leaves
# an empty report, which an SDK may take for none.
_HEAD = """\
exec </dev/null >/dev/null 2>&1
rm -f "$1".*
n=$2 w=$3
shift 3
mkdir -p "$w" && cd "$w" || exit
[ -f "$n.in" ] || : >"$n.in"
"""
# $1: seconds; $2: bytes kept of an output; then the program. Outputs may be anything by now, so
# that they are read has a time as well.
_RUN = f"""\
seconds=$1 keep=$2
shift 2
timeout -s KILL "$seconds" "$@" <"$n.in" >"$n.out" 2>"$n.err"
code=$?
timeout -s KILL {_REPORT_SECONDS} sh -c '
  [ -f "$1.out" ] && [ -f "$1.err" ] || exit
  out=$(wc -c <"$1.out") err=$(wc -c <"$1.err")
  echo "$3" $out $err
  for file in "$out $1.out" "$err $1.err"; do
    if [ "${{file%% *}}" -le "$2" ]; then
      head -c "$2" "${{file#* }}"
    else
      head -c $(($2 - $2 / 2)) "${{file#* }}"
      tail -c $(($2 / 2)) "${{file#* }}"
    fi
  done
' sh "$n" "$keep" "$code" >"$n.made" && mv "$n.made" "$n.report"
"""
_UNPACK = 'tar -x -f "$n.in" && echo done >"$n.report"'
_PACK = 'tar -c -f "$n.made" . && mv "$n.made" "$n.report"'
# $1: a path; $2: bytes. The content follows a line.
_READ = """\
[ -f "$1" ] && echo >"$n.made" && head -c "$2" "$1" >>"$n.made" && mv "$n.made" "$n.report"
"""
_READY = 'echo ready >"$n.report"'


@dataclasses.dataclass(unsafe_hash=True)
class RentedConfig(SandboxConfig):
  """Settings of a vendor's back end; the figures are ours.

  The isolation is the vendor's, so no protection is claimed. Background processes run until their
  box is closed. The image needs sh, tar, the usual small programs (head, tail, wc, timeout) and
  Python for Python code. The SDK takes its key from the environment.

  Attributes:
    limits: bounds of a run: those that a shell sets, the wall clock, and what is kept of outputs.
      Memory and disk are those of the whole sandbox.
    workdir: absolute path of the work directory; it is made where it lacks.
    python: the image's interpreter, 3.8 or later.
    env: NAME=value.
    metadata: name=value, for the vendor's records.
    network: whether programs reach the network.
    lifetime_seconds: after this the vendor ends the sandbox by itself.
    create_seconds: longest time to wait until a sandbox runs.
    call_seconds: what one call may take beyond the program's own time.
    concurrency: runs at once; further ones wait their turn, and their clock starts with the turn.
    queue_seconds: longest wait for a turn; then the run ends as INFRA_ERROR, never as TIMEOUT.
  """

  workdir: str = "/tmp/work"
  python: str = "python3"
  env: tuple[str, ...] = ("PYTHONHASHSEED=0",)
  metadata: tuple[str, ...] = ()
  network: bool = False
  lifetime_seconds: PositiveFloat = 3600.0
  create_seconds: PositiveFloat = 120.0
  call_seconds: PositiveFloat = 60.0
  concurrency: PositiveInt = 32
  queue_seconds: PositiveFloat = 600.0

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.workdir.startswith("/"), f"{path}.workdir", self.workdir, "an absolute path")
    for name in ("env", "metadata"):
      for pair in getattr(self, name):
        check("=" in pair, f"{path}.{name}", getattr(self, name), "NAME=value")

  @property
  def overhead_seconds(self) -> float:
    return self.call_seconds


class Provider(abc.ABC, Generic[Handle]):
  """A vendor's SDK. Every method raises InfraError if the service fails, and no other error.

  ``handle`` is what ``create`` returned.
  """

  @abc.abstractmethod
  async def create(self) -> Handle:
    """Rents a sandbox and waits until it runs."""

  @abc.abstractmethod
  async def exec(self, handle: Handle, command: str, seconds: float) -> None:
    """Runs a shell command to its end; its output and status are ignored."""

  @abc.abstractmethod
  async def upload(self, handle: Handle, path: str, content: bytes) -> None:
    """Writes the file at an absolute path in a directory that is there."""

  @abc.abstractmethod
  async def download(self, handle: Handle, path: str, most_bytes: int) -> bytes | None:
    """The first ``most_bytes`` of the file at an absolute path; None where there is none."""

  @abc.abstractmethod
  async def close(self, handle: Handle) -> None:
    """Ends the sandbox; harmless where it has ended."""


class _NoReportError(InfraError):
  """A script's report cannot be read: the service may have failed, or a program may have hidden
  it."""


class RentedSandbox(StartedSandbox, Generic[Handle]):
  """A back end over a vendor's sandboxes. See the Sandbox protocol."""

  def __init__(self, name: str, provider: Provider[Handle], config: RentedConfig):
    super().__init__()
    config.validate(name)
    self.name, self.provider, self.config = name, provider, config
    self.places = Places(config.concurrency, config.queue_seconds)

  async def create(self, snapshot: bytes | None = None) -> RentedBox[Handle]:
    files = None if snapshot is None else archive.normalised(snapshot)
    await self.start()
    box = await self._new_box()
    try:
      if files is not None:
        await box.unpack(files)
    except BaseException:
      await box.close()
      raise
    return box

  async def _start(self) -> None:
    box = await self._new_box()
    try:
      result = await box.exec(PythonScript("print('ready')"))
    finally:
      await box.close()
    if (result.status, result.stdout) != (RunStatus.OK, "ready\n"):
      raise SandboxError(
        f"{self.name}: its sandboxes do not run Python programs as they should: {result.status} "
        f"{result.detail} {result.stderr.strip()[-500:]}".rstrip()
      )
    _log.warning("%s: what shuts programs in is the vendor's own; none is claimed", self.name)

  async def _new_box(self) -> RentedBox[Handle]:
    box = RentedBox(self, await self.provider.create())
    self.boxes.add(box)
    return box


class RentedBox(CalledBox, Generic[Handle]):
  """One rented sandbox; made by ``RentedSandbox.create``. See the Box protocol."""

  def __init__(self, sandbox: RentedSandbox[Handle], handle: Handle):
    super().__init__(sandbox.name)
    self._sandbox, self._handle = sandbox, handle
    self._scratch = f"/tmp/.agentjax-{secrets.token_hex(8)}"
    self._scripts = 0  # so far

  async def exec(
    self,
    program: Program,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits | None = None,
  ) -> SandboxResult:
    limits = limits or self._sandbox.config.limits
    if isinstance(program, Command):
      argv = as_request(program)["argv"]
    else:
      argv = [self._sandbox.config.python, *guest.BOOT_ARGUMENTS]
      stdin = guest.framed(guest.plain(program), stdin)
    async with self.turn():
      try:
        async with self._sandbox.places.one():
          return await self._await_call(self._run(argv, stdin, files or {}, limits))
      except QueueTimeout as error:
        return infra_error(str(error), "queue")

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    inside = "/".join(checked_parts(path))
    async with self.turn():
      report = await self._script(_READ, f"./{inside}", str(max_bytes + 1), most=max_bytes + 2)
    if report is None:
      raise BoxContentError(f"{path!r} in the sandbox is not a regular file that can be read")
    if len(report) > max_bytes + 1:
      raise BoxContentError(
        f"{path!r} in the sandbox has more than {max_bytes} bytes; raise max_bytes"
      )
    return report[1:]

  async def snapshot(self) -> bytes:
    async with self.turn():
      held = await self._script(_PACK, most=_SNAPSHOT_BYTES + 1)
    if held is None:
      raise SandboxError(f"{self._sandbox.name}: the work directory cannot be packed")
    if len(held) > _SNAPSHOT_BYTES:
      raise BoxContentError(
        f"the sandbox's files hold more than {_SNAPSHOT_BYTES} bytes; cannot snapshot"
      )
    return archive.normalised(held)

  async def unpack(self, files: bytes) -> None:
    """Adds the files of a tar. Raises SandboxError: what is in the box does not let them in."""
    if await self._script(_UNPACK, sent=files, most=16) is None:
      raise SandboxError(f"{self._sandbox.name}: files cannot be written in the work directory")

  async def _put(self, path: str, content: bytes) -> None:
    await self.unpack(archive.of_files({path: content}))

  async def _wipe(self) -> None:
    self._sandbox.boxes.discard(self)
    await surely(self._end())

  async def _end(self) -> None:
    try:
      await self._sandbox.provider.close(self._handle)
    except InfraError as error:
      _log.warning("%s: a sandbox lives on until its time is over: %s", self._sandbox.name, error)

  async def _run(
    self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: SandboxLimits
  ) -> SandboxResult:
    seconds = math.ceil(limits.wall_seconds)
    start = asyncio.get_running_loop().time()
    try:
      if files:
        await self.unpack(archive.of_files(files))
        start = asyncio.get_running_loop().time()
      report = await self._script(
        _RUN,
        *(str(seconds), str(limits.output_bytes), *guest.limited(argv, limits)),
        sent=stdin,
        seconds=seconds + _REPORT_SECONDS,
        most=2 * limits.output_bytes + 256,
      )
    except _NoReportError as error:
      if not await self._works():
        return infra_error(str(error))
      report = None  # of all that is here, the program alone can have made it unreadable
    except InfraError as error:
      return infra_error(str(error))
    return _result(report, asyncio.get_running_loop().time() - start, limits)

  async def _works(self) -> bool:
    """Whether another script leaves a report that can be read."""
    try:
      return await self._script(_READY, most=16) == b"ready\n"
    except InfraError:
      return False

  async def _script(
    self,
    body: str,
    *arguments: str,
    most: int,
    sent: bytes = b"",
    seconds: float = 0.0,
  ) -> bytes | None:
    """Runs a script of ours; the first ``most`` bytes of its report, None where it left none.

    Args:
      body: what follows _HEAD.
      arguments: of the script, beyond those of _HEAD.
      most: of the report.
      sent: content of its file ``$n.in``.
      seconds: that it may take by itself, beyond the call's own.

    Raises:
      _NoReportError: there is a report, or was, and it cannot be read.
      InfraError: the service failed before.
    """
    provider, config = self._sandbox.provider, self._sandbox.config
    former, self._scripts = self._scripts, self._scripts + 1
    last, name = f"{self._scratch}.{former}", f"{self._scratch}.{self._scripts}"
    command = shlex.join(["sh", "-c", _HEAD + body, "sh", last, name, config.workdir, *arguments])
    limit = seconds + config.call_seconds
    try:
      async with asyncio.timeout(limit):
        if sent:
          await provider.upload(self._handle, f"{name}.in", sent)
        if len(command) > _COMMAND_CHARACTERS:
          await provider.upload(self._handle, f"{name}.sh", command.encode())
          command = f"sh {name}.sh"
        await provider.exec(self._handle, command, limit)
    except TimeoutError:
      raise InfraError(f"{self._sandbox.name}: no answer within {limit:g} s") from None
    said = f"no answer within {config.call_seconds:g} s"
    for _ in range(2):
      try:
        async with asyncio.timeout(config.call_seconds):
          return await provider.download(self._handle, f"{name}.report", most)
      except TimeoutError:
        pass
      except InfraError as error:
        said = str(error)
    raise _NoReportError(f"{self._sandbox.name}: {said}")


def _result(report: bytes | None, seconds: float, limits: SandboxLimits) -> SandboxResult:
  """Reads the script's report of a run. The program may have forged it; such a fault is the
  program's."""
  try:
    words, _, content = (report or b"").partition(b"\n")
    code, *totals = (int(word) for word in words.split())
    outputs = []
    for total in totals:
      size = min(total, limits.output_bytes)
      head = size - limits.output_bytes // 2 if total > limits.output_bytes else size
      outputs.append(Kept(content[:head], content[head:size], total))
      content = content[size:]
    stdout, stderr = outputs
    if content or min(totals) < 0 or not 0 <= code <= 255:
      raise ValueError("the report does not say what it announces")
  except ValueError:
    detail = "it ended the process that watches it, or changed what that reports"
    none = Kept(b"", b"", 0)
    return as_result(Ended("cancelled", detail, -9, seconds, none, none), limits)
  reason, detail = "exit", ""
  most = min(limits.output_kill_bytes, limits.file_bytes - 1)  # outputs are files in the box
  if max(totals) > most:
    reason, detail = "output", f"wrote more than {most} bytes"
  elif code in _OF_THE_CLOCK and seconds >= limits.wall_seconds:
    reason, detail, code = "wall", f"did not end within {limits.wall_seconds:.1f} s", 137
  if code > 128:
    code = 128 - code  # as shells report a signal
  return as_result(Ended(reason, detail, code, seconds, stdout, stderr), limits)


def load_sdk(module: str, name: str) -> ModuleType:
  """A vendor's SDK. Raises SandboxError that names the extra."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise SandboxError(
      f"the {name} back end needs the vendor's SDK: pip install 'agentjax[{name}]'"
    ) from error


@contextlib.contextmanager
def failing_as(name: str) -> Iterator[None]:
  """Whatever an SDK raises is the service's failure."""
  try:
    yield
  except Exception as error:
    raise InfraError(f"{name}: {type(error).__name__}: {str(error)[:500]}") from error


async def first_bytes(stream: AsyncIterator[bytes], most: int) -> bytes:
  """As much of a stream as is wanted, and not a chunk more."""
  held = bytearray()
  async for chunk in stream:
    held += chunk
    if len(held) >= most:
      break
  return bytes(held[:most])


def pairs(settings: tuple[str, ...]) -> dict[str, Any]:
  """NAME=value settings as a mapping."""
  return dict(pair.split("=", 1) for pair in settings)
