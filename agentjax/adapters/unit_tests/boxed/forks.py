"""Runs each case in its own process, so that cases do not influence each other."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

_MOST_BYTES = 8 * 2**20  # that one case may report
_WALL_OVER_CPU = 5.0  # a machine shared by many may give a process a fifth of a core
_TICK = 0.05


def silence() -> int:
  """Discards printed output; returns a descriptor of the original stdout."""
  out = os.dup(1)
  nowhere = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(nowhere, fd)
  return out


def in_a_fork(work: Callable[[Callable[[str], None]], None], cpu_seconds: int) -> dict[str, Any]:
  """Runs ``work(report)`` in a fork within a CPU time.

  Returns:
    {"lines": what it reported, one text a call; "ended": "" where it came to its end, else why
    not; "seconds": CPU time that it took}.
  """
  reader, writer = os.pipe()
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      os.close(reader)
      os.setsid()
      hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
      hard = cpu_seconds + 1 if hard == resource.RLIM_INFINITY else min(hard, cpu_seconds + 1)
      resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_seconds, hard), hard))

      def report(line: str) -> None:
        data = line.encode() + b"\n"
        while data:
          data = data[os.write(writer, data) :]

      work(report)
      code = 0
    finally:
      os._exit(code)
  os.close(writer)
  os.set_blocking(reader, False)
  data, ended, seconds = _listen(pid, reader, time.monotonic() + _WALL_OVER_CPU * cpu_seconds)
  os.close(reader)
  *lines, rest = data.decode("utf-8", errors="replace").split("\n")
  return {
    "lines": lines,
    "ended": ended or ("" if not rest else "it ended in the middle of a line"),
    "seconds": seconds,
  }


def _listen(pid: int, reader: int, deadline: float) -> tuple[bytes, str, float]:
  data = bytearray()
  while True:
    # Waits for the process, not for the end of the pipe: a process that it left behind may hold the
    # pipe open.
    done, status, usage = os.wait4(pid, os.WNOHANG)
    open_ = _read_all(reader, data)
    if done:
      return bytes(data), _why(status), usage.ru_utime + usage.ru_stime
    if len(data) > _MOST_BYTES or time.monotonic() > deadline:
      os.kill(pid, signal.SIGKILL)
      usage = os.wait4(pid, 0)[2]
      why = "time ran out" if len(data) <= _MOST_BYTES else "it answered too much"
      return bytes(data[:_MOST_BYTES]), why, usage.ru_utime + usage.ru_stime
    if open_:
      select.select([reader], [], [], _TICK)
    else:
      time.sleep(0.001)


def _read_all(reader: int, data: bytearray) -> bool:
  """Reads what is there; False at the end of the pipe."""
  while len(data) <= _MOST_BYTES:
    try:
      part = os.read(reader, 1 << 16)
    except BlockingIOError:
      return True
    if not part:
      return False
    data += part
  return True


def _why(status: int) -> str:
  code = os.waitstatus_to_exitcode(status)
  if code == -signal.SIGXCPU:
    return "CPU time ran out"
  if code < 0:
    return f"signal {-code}"
  return "" if code == 0 else "it ended early"


def run_cases(
  cases: Iterable[tuple[str, Callable[[Callable[[str], None]], None]]],
  cpu_seconds: int,
  *,
  until_failure: bool = False,
) -> dict[str, dict[str, Any]]:
  """``in_a_fork`` of each, by name; ``until_failure`` leaves out those after one that broke off."""
  results: dict[str, dict[str, Any]] = {}
  gc.freeze()  # what is here already need not be looked at, and so copied, in each fork
  for name, work in cases:
    results[name] = in_a_fork(work, cpu_seconds)
    if until_failure and results[name]["ended"]:
      break
  return results
