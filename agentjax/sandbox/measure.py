"""What a run takes and leaves: its output, its files, and its processes as /proc shows them.

Imports the standard library only, as the zygote does. Process ids are those by which /proc names
processes; in a namespace of processes kill and wait take others, see ``own_id``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
import time
from typing import Any

_TICK = 0.1  # seconds between looks at a run's files, at least
_HAS_CHILDREN_FILE = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class Output:
  """The head and the tail of what a program writes, and how much that was.

  They lie in one buffer and are nowhere else, so that nothing is left of them after ``wipe()``.
  """

  def __init__(self, keep: int):
    self._buffer = memoryview(bytearray(keep))
    self._head = keep - keep // 2
    self.total = 0

  def add(self, data: Any) -> None:
    data = memoryview(data)
    place = min(self.total, self._head)
    self.total += len(data)
    first = min(len(data), self._head - place)
    self._buffer[place : place + first] = data[:first]
    ring = self._buffer[self._head :]
    data = data[first:][-len(ring) :] if len(ring) else data[:0]
    if data:
      at = (self.total - len(data) - self._head) % len(ring)
      first = min(len(data), len(ring) - at)
      ring[at : at + first] = data[:first]
      ring[: len(data) - first] = data[first:]

  def views(self) -> list[memoryview]:
    """The head, and the tail in two parts."""
    ring = self._buffer[self._head :]
    held = min(max(self.total - self._head, 0), len(ring))
    start = (self.total - self._head) % len(ring) if 0 < held == len(ring) else 0
    return [self._buffer[: min(self.total, self._head)], ring[start:held], ring[:start]]

  @property
  def head(self) -> bytes:
    return bytes(self.views()[0])

  @property
  def tail(self) -> bytes:
    return b"".join(self.views()[1:])

  def wipe(self) -> None:
    used = min(self.total, len(self._buffer))
    self._buffer[:used] = bytes(used)


class Disk:
  """Measures what a run's files take, deleted but open ones too; at most a tenth of the time."""

  def __init__(self, directory: str, limits: dict[str, Any]):
    self._directory, self._limits = directory, limits
    self._next = time.monotonic() + _TICK
    self.looked = False

  def too_much(self, family: list[int]) -> str | None:
    """Which bound is passed, or None; mostly None without a look."""
    if time.monotonic() < self._next:
      return None
    self.looked = True
    start = time.thread_time()  # not wall time: a busy machine would make the looks rarer
    most_files, most_bytes = self._limits["files"], self._limits["disk_bytes"]
    count, held = self._below(most_files)
    held += sum(unlinked_bytes(family).values())
    self._next = time.monotonic() + max(_TICK, 10 * (time.thread_time() - start))
    if count > most_files:
      return f"made more than {most_files} files and directories"
    if held > most_bytes:
      return f"its files hold more than {most_bytes} bytes"
    return None

  def _below(self, most_files: int) -> tuple[int, int]:
    """Entries below the directory, counted up to ``most_files``, and the bytes they occupy."""
    count, held, waiting = 0, 0, [self._directory]
    while waiting and count <= most_files:
      try:
        with os.scandir(waiting.pop()) as listing:
          for entry in listing:
            count += 1
            held += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
              waiting.append(entry.path)
            if count > most_files:
              break
      except OSError as error:  # it is being changed meanwhile
        if error.errno == errno.ENAMETOOLONG:
          count = most_files + 1  # nested deeper than can be measured
    return count, held


def children(pid: int | str) -> list[int]:
  if not _HAS_CHILDREN_FILE:
    return _children_by_scan(int(os.readlink("/proc/self")) if pid == "self" else int(pid))
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
      with open(f"/proc/{int(entry)}/stat", errors="replace") as file:
        if int(file.read().rpartition(")")[2].split()[1]) == parent:
          found.append(int(entry))
    except (OSError, ValueError):
      continue
  return found


def descendants(pid: int | str) -> list[int]:
  found = children(pid)
  for child in found:  # grows while it is walked
    found += children(child)
  return found


def own_id(pid: int) -> int:
  """The id, in this process's own namespace, of one that /proc names so; 0 when it is gone."""
  if os.getpid() != 1:
    return pid
  depth = len(ids_by_namespace("self")) - 1
  ids = ids_by_namespace(pid)
  return ids[depth] if len(ids) > depth else 0


def ids_by_namespace(pid: int | str) -> list[int]:
  with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as file:
    for line in file:
      if line.startswith("NSpid:"):
        return [int(v) for v in line.split()[1:]]
  return []


def kill(pid: int) -> None:
  """Kills a process that /proc names so."""
  if inner := own_id(pid):
    with contextlib.suppress(ProcessLookupError):
      os.kill(inner, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
  try:
    with open(f"/proc/{pid}/statm") as file:
      return int(file.read().split()[1]) * resource.getpagesize()
  except (OSError, IndexError):
    return 0


def task_count(pid: int) -> int:
  try:
    return len(os.listdir(f"/proc/{pid}/task"))
  except OSError:
    return 0


def states(pid: int) -> set[str]:
  """States of a process's threads: T stopped, Z dead but not reaped, R, S, D; none when gone."""
  found = set()
  with contextlib.suppress(OSError, IndexError):
    for task in os.listdir(f"/proc/{pid}/task"):
      with open(f"/proc/{pid}/task/{task}/stat", errors="replace") as file:
        found.add(file.read().rpartition(")")[2].split()[0])
  return found


def cpu_seconds(family: list[int]) -> float:
  """User and system time of these processes and of those they waited for."""
  ticks = 0
  for pid in family:
    with contextlib.suppress(OSError, IndexError):
      with open(f"/proc/{pid}/stat", errors="replace") as file:
        ticks += sum(int(v) for v in file.read().rpartition(")")[2].split()[11:15])
  return ticks / os.sysconf("SC_CLK_TCK")


def unlinked_bytes(family: list[int]) -> dict[tuple[int, int], int]:
  """Bytes of the files that these processes hold open though no name is left, by device and inode.

  Some kernels let nobody look into a process that made itself unreadable; seccomp forbids that.
  """
  found = {}
  for pid in family:
    with contextlib.suppress(OSError):
      for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
          status = os.stat(f"/proc/{pid}/fd/{fd}")
          if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
  return found
