"""The protocol of sandboxes: a back end opens boxes; a box runs programs over one work directory.

Back ends differ in their protections and features, so both are data: ``protections`` were probed on
this machine, ``capabilities`` list the features.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from agentjax.config import (
  AtLeastTwo,
  Config,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Range,
)
from agentjax.faults import Fault, Owner


class SandboxError(RuntimeError):
  """The sandbox itself cannot do what was asked; never the fault of the program inside."""


class BoxContentError(SandboxError):
  """Files that programs left in a box cannot be read, saved or replaced; the programs' fault."""

  fault = Fault(Owner.POLICY, "files")


class RunStatus(enum.StrEnum):
  """How a program ended. Only INFRA_ERROR is the system's fault."""

  OK = "ok"  # exit code 0
  ERROR = "error"  # any other exit code
  TIMEOUT = "timeout"  # wall clock or CPU time
  OUTPUT_LIMIT = "output_limit"
  MEMORY_LIMIT = "memory_limit"
  KILLED = "killed"  # by a signal: a crash, the kernel, itself
  INFRA_ERROR = "infra_error"


class Protection(enum.StrEnum):
  """What code in a box cannot do or escape, as probed on this machine."""

  LIMITS = "limits"  # memory, CPU time, file size, open files and processes are bounded
  DESCENDANTS = "descendants"  # everything it started dies with it, daemons too
  NETWORK = "network"  # no connection leaves the box
  PROCESSES = "processes"  # cannot signal, trace or read the memory of a process outside
  FILESYSTEM = "filesystem"  # reads the system and the interpreter only, writes its directory only
  SYSCALLS = "syscalls"  # namespaces, tracing, mounting, keys, bpf, io_uring are refused
  USER = "user"  # runs as a user that owns nothing else


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """Features of a back end beyond running one program."""

  files: bool  # upload and download
  snapshot: bool  # a work directory can be saved and a box opened from it
  commands: bool  # argv programs, besides Python code
  sessions: bool = False  # an interpreter that keeps its names from cell to cell


@dataclasses.dataclass(unsafe_hash=True)
class SandboxLimits(Config):
  """Bounds of one run; the figures are ours.

  Attributes:
    wall_seconds: from start to forced end of the run with all that it started.
    cpu_seconds: CPU time of each process, rounded up to whole seconds.
    memory_bytes: address space of each process beyond the bare interpreter's, and resident memory
      of all processes of the run together.
    processes: processes and threads alive at once.
    output_bytes: bytes kept of stdout and of stderr each, half from the head, half from the tail.
    output_kill_bytes: a run that has written more than this to either is ended.
    file_bytes: size of one file.
    disk_bytes: what the work directory's files occupy together, deleted but open ones included.
    files: files and directories in the work directory.
    open_files: open file descriptors of each process.
  """

  wall_seconds: PositiveFloat = 10.0
  cpu_seconds: PositiveFloat = 10.0
  memory_bytes: Annotated[int, Range(2**24)] = 512 * 2**20
  processes: PositiveInt = 32
  output_bytes: AtLeastTwo = 64 * 2**10
  output_kill_bytes: int = 16 * 2**20
  file_bytes: NonNegativeInt = 16 * 2**20
  disk_bytes: NonNegativeInt = 256 * 2**20
  files: NonNegativeInt = 10_000
  open_files: Annotated[int, Range(16)] = 128

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.output_kill_bytes >= self.output_bytes,
      "output_kill_bytes",
      f">= output_bytes ({self.output_bytes})",
    )


@dataclasses.dataclass(frozen=True)
class PythonScript:
  """Python source, run as ``__main__``; ``seed`` seeds the ``random`` module."""

  source: str
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class PythonCell:
  """Like PythonScript; a final expression that is not None is also printed, as in a notebook."""

  source: str
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Command:
  """A program by name or path with its arguments; no shell."""

  argv: tuple[str, ...]


Program = PythonScript | PythonCell | Command


def as_request(program: Program) -> dict[str, Any]:
  """A program as plain data."""
  if isinstance(program, Command):
    if not program.argv:
      raise SandboxError("a Command needs at least the program's name in argv")
    return {"kind": "command", "argv": list(program.argv)}
  kind = "script" if isinstance(program, PythonScript) else "cell"
  return {"kind": kind, "source": program.source, "seed": program.seed}


@dataclasses.dataclass(frozen=True)
class SandboxResult:
  """Outcome of one run.

  Attributes:
    status: how it ended.
    stdout, stderr: UTF-8; bytes that are not valid UTF-8 read ``\\xff``. Beyond
      ``SandboxLimits.output_bytes`` the middle is replaced by a line that says how much is missing.
    exit_code: the program's, or minus the signal that ended it; None when it was never started.
    seconds: wall time.
    detail: one line on why, empty when status is OK.
    truncated: whether output is missing.
    restarted: in a session, the interpreter is a new one, so names of earlier cells are gone.
    fault: what failed, if status is INFRA_ERROR; else None.
  """

  status: RunStatus
  stdout: str
  stderr: str
  exit_code: int | None
  seconds: float
  detail: str = ""
  truncated: bool = False
  restarted: bool = False
  fault: Fault | None = None


class Session(Protocol):
  """A Python interpreter that lives from cell to cell. Close it in a ``finally``.

  Names, modules and open files are kept; processes that a cell started die with the cell. All
  limits hold for each cell, except memory and files, which count over all cells. A cell that
  raises, or calls ``sys.exit``, leaves the interpreter alive. A cell that ends as TIMEOUT,
  OUTPUT_LIMIT or KILLED, or in which memory of the whole exceeds its limit, ends the interpreter
  too; the next cell gets a new one, and its result says ``restarted``.
  """

  @property
  def alive(self) -> bool:
    """Whether the interpreter with the names of earlier cells is alive."""
    ...

  async def run(
    self, source: str, *, seed: int = 0, wall_seconds: float | None = None
  ) -> SandboxResult:
    """Runs one cell (see PythonCell); cells wait for each other. Cancelling ends the interpreter.

    Args:
      source: Python source.
      seed: seeds the ``random`` module (and NumPy's, where loaded) anew for this cell.
      wall_seconds: replaces the limits' own for this cell.

    Raises:
      SandboxError: the session or its box is closed.
    """
    ...

  async def close(self) -> None:
    """Ends the interpreter and all it started; closing twice is harmless."""
    ...


class Box(Protocol):
  """One work directory and the programs run in it, one at a time. Close it in a ``finally``."""

  async def exec(
    self,
    program: Program,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    limits: SandboxLimits | None = None,
  ) -> SandboxResult:
    """Writes ``files`` (relative path -> content), runs ``program``, waits until all of it is dead.

    Cancelling kills the run. ``limits`` None means the back end's own.

    Raises:
      SandboxError: a path leaves the work directory.
    """
    ...

  async def session(self, *, limits: SandboxLimits | None = None) -> Session:
    """Opens an interpreter session over the work directory, at most one a box at a time.

    While it is open ``exec`` and ``snapshot`` are refused; files may be uploaded and downloaded
    between its cells.

    Raises:
      SandboxError: the back end has no sessions (``Capabilities.sessions``), or one is open.
    """
    ...

  async def upload(self, path: str, content: bytes) -> None:
    """Writes one file below the work directory; never through a link."""
    ...

  async def download(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
    """Reads one regular file below the work directory; never through a link.

    Raises:
      BoxContentError: no such regular file, or larger than ``max_bytes``.
    """
    ...

  async def snapshot(self) -> bytes:
    """The work directory's files, for ``Sandbox.create(snapshot=...)``.

    Raises:
      BoxContentError: they are too many, too large or too deep.
    """
    ...

  async def close(self) -> None:
    """Kills what runs and wipes the work directory; closing twice is harmless."""
    ...


class Sandbox(Protocol):
  """A back end."""

  @property
  def capabilities(self) -> Capabilities:
    """What may be asked for."""
    ...

  async def start(self) -> frozenset[Protection]:
    """Starts the back end and returns the protections that hold; repeated calls do nothing.

    Raises:
      SandboxError: it cannot run here, or a protection that the settings require is missing.
    """
    ...

  async def create(self, snapshot: bytes | None = None) -> Box:
    """Opens a box: empty, or with the files of a snapshot."""
    ...

  async def close(self) -> None:
    """Closes all boxes and ends the back end."""
    ...


async def run_once(
  sandbox: Sandbox,
  program: Program,
  *,
  stdin: bytes = b"",
  files: Mapping[str, bytes] | None = None,
  limits: SandboxLimits | None = None,
) -> SandboxResult:
  """Runs one program in a box of its own, wiped afterwards."""
  box = await sandbox.create()
  try:
    return await box.exec(program, stdin=stdin, files=files, limits=limits)
  finally:
    await box.close()


async def is_healthy(sandbox: Sandbox) -> bool:
  """Whether an idle program ends well in a fresh box: then other failures are not the sandbox's."""
  try:
    return (await run_once(sandbox, PythonScript("pass"))).status is RunStatus.OK
  except (SandboxError, OSError):
    return False
