"""Converts the end of a run to a SandboxResult, for all back ends."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from agentjax.faults import Fault, Owner
from agentjax.sandbox.interface import RunStatus, SandboxLimits, SandboxResult
from agentjax.sandbox.measure import Output

_SIGXCPU = 24
_STATUS_OF_REASON = {
  "wall": RunStatus.TIMEOUT,
  "cpu": RunStatus.TIMEOUT,
  "output": RunStatus.OUTPUT_LIMIT,
  "memory": RunStatus.MEMORY_LIMIT,
  "processes": RunStatus.KILLED,
  "disk": RunStatus.KILLED,
  "cancelled": RunStatus.KILLED,
  "broken": RunStatus.KILLED,
  "setup": RunStatus.INFRA_ERROR,
}


class Kept(NamedTuple):
  """Head and tail of an output of ``total`` bytes, as another process kept them."""

  head: bytes
  tail: bytes
  total: int


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a run ended, as its supervisor saw it.

  Attributes:
    reason: why it was ended: "wall", "cpu", "output", "memory", "processes", "disk", "cancelled",
      "broken"; "setup" when it was never started; anything else: by itself.
    detail: one line on the reason.
    exit_code: the program's, or minus the signal that ended it.
    seconds: wall time.
    stdout, stderr: head and tail of what it wrote.
    cpu_seconds: CPU time of the program's process, 0 where that is not known.
  """

  reason: str
  detail: str
  exit_code: int | None
  seconds: float
  stdout: Output | Kept
  stderr: Output | Kept
  cpu_seconds: float = 0.0


def as_result(ended: Ended, limits: SandboxLimits) -> SandboxResult:
  """The result that a caller sees of a run under ``limits``."""
  stdout, stderr = text(ended.stdout), text(ended.stderr)
  truncated = max(ended.stdout.total, ended.stderr.total) > limits.output_bytes
  code, reason, detail = ended.exit_code, ended.reason, ended.detail
  if reason == "setup":
    return dataclasses.replace(infra_error(detail), seconds=ended.seconds)
  status = RunStatus.OK
  if reason in _STATUS_OF_REASON:
    status = _STATUS_OF_REASON[reason]
  elif code is None:
    return dataclasses.replace(
      infra_error(detail or "no exit code came back"), seconds=ended.seconds
    )
  elif code == -_SIGXCPU or (code == -9 and ended.cpu_seconds >= limits.cpu_seconds):
    reason, status = "cpu", RunStatus.TIMEOUT
  elif code < 0:
    status, detail = RunStatus.KILLED, f"ended by signal {-code}"
  elif code == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
    status = RunStatus.MEMORY_LIMIT
    detail = f"needs more than {limits.memory_bytes} bytes of memory"
  elif code != 0:
    status, detail = RunStatus.ERROR, f"exit code {code}"
  if reason == "cpu":
    detail = f"used more than {limits.cpu_seconds:g} s of CPU time"
  return SandboxResult(status, stdout, stderr, code, ended.seconds, detail, truncated)


def text(output: Output | Kept) -> str:
  """What the policy reads of an output: all of it, or head, a line on what is missing, tail."""
  head, tail = output.head, output.tail
  left_out = output.total - len(head) - len(tail)
  if left_out <= 0:
    return (head + tail).decode("utf-8", errors="backslashreplace")
  first = head.decode("utf-8", errors="backslashreplace")
  last = tail.decode("utf-8", errors="backslashreplace")
  return f"{first}\n[... {left_out} bytes left out ...]\n{last}"


def infra_error(detail: str, cause: str = "sandbox") -> SandboxResult:
  """The result of a run that failed without the program's fault; ``cause`` as in
  ``faults.Fault``."""
  fault = Fault(Owner.INFRASTRUCTURE, cause, detail)
  return SandboxResult(RunStatus.INFRA_ERROR, "", "", None, 0.0, detail, fault=fault)
