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
from collections.abc import Iterator
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
  """Measures what a run's files take; deleted ones count while they are open or mapped.

  A look may be long, so looks take a tenth of the time; one more is taken at once where the file
  system lost as much room as the run may have. None goes on past ``deadline``, the monotonic time
  at which the run is ended anyway.
  """

  def __init__(self, directory: str, limits: dict[str, Any]):
    self._directory, self._limits = directory, limits
    self.deadline = time.monotonic() + limits["wall_seconds"]
    self._next = time.monotonic() + _TICK
    self._free = _free_bytes(directory)  # at the last look
    self._inherited: set[int] | None = None  # deleted files that this process itself has mapped
    self.looked = False

  def too_much(self, family: list[int]) -> str | None:
    """Which bound is passed, or None; mostly None without a look."""
    most_files, most_bytes = self._limits["files"], self._limits["disk_bytes"]
    free = _free_bytes(self._directory)
    if time.monotonic() < self._next and self._free - free <= most_bytes:
      return None
    self.looked, self._free = True, free
    start = time.thread_time()  # not wall time: a busy machine would make the looks rarer
    if self._inherited is None:
      self._inherited = set(_mapped_deleted("self"))
    count, held = self._below(most_files)
    if count <= most_files and held <= most_bytes:
      held += unlinked_bytes(family, self._limits["file_bytes"], self._inherited)
    self._next = time.monotonic() + max(_TICK, 10 * (time.thread_time() - start))
    if count > most_files:
      return f"made more than {most_files} files and directories"
    if held > most_bytes:
      return f"its files hold more than {most_bytes} bytes"
    return None

  def _below(self, most_files: int) -> tuple[int, int]:
    """Entries below the directory, counted up to ``most_files``, and the bytes they occupy."""
    count, held, waiting = 0, 0, [self._directory]
    while waiting and count <= most_files and time.monotonic() < self.deadline:
      path = waiting.pop()
      try:
        # By descriptor: with its path each entry would cost as much as the path is long.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
      except OSError as error:  # it is being changed meanwhile
        if error.errno == errno.ENAMETOOLONG:
          count = most_files + 1  # nested deeper than can be measured
        continue
      try:
        with contextlib.suppress(OSError), os.scandir(folder) as listing:
          for entry in listing:
            count += 1
            held += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
              waiting.append(f"{path}/{entry.name}")
            if count > most_files:
              break
      finally:
        os.close(folder)
    return count, held


def _free_bytes(directory: str) -> int:
  status = os.statvfs(directory)
  return status.f_bfree * status.f_frsize


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
  return next(filter(None, (_resident(shown) for shown in _threads(pid))), 0)


def _resident(shown: str) -> int:
  try:
    with open(f"{shown}/statm") as file:
      return int(file.read().split()[1]) * resource.getpagesize()
  except (OSError, IndexError):
    return 0


def _threads(pid: int | str) -> Iterator[str]:
  """Where /proc shows what a process's threads share; the first shows nothing once it has ended."""
  yield f"/proc/{pid}"
  with contextlib.suppress(OSError):
    for task in os.listdir(f"/proc/{pid}/task"):
      if task != str(pid):
        yield f"/proc/{pid}/task/{task}"


def resident_beyond(family: list[int], baseline: int, most: int) -> int:
  """Resident bytes of processes, less ``baseline`` for each that is a mere fork of this one.

  Above ``most`` only the comparison with it counts. A program that was started by exec holds
  nothing of this process.
  """
  sizes = {pid: resident_bytes(pid) for pid in family}
  held = sum(max(0, size - baseline) for size in sizes.values())
  if held <= most < sum(sizes.values()):
    image = _image("self")
    held += sum(min(size, baseline) for pid, size in sizes.items() if _image(pid) != image)
  return held


def _image(pid: int | str) -> str:
  """Where in memory a process's stack begins; another place after each exec."""
  for shown in _threads(pid):
    with contextlib.suppress(OSError, IndexError), open(f"{shown}/stat") as file:
      if (start := file.read().rpartition(")")[2].split()[25]) != "0":
        return start
  return "0"


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


def unlinked_bytes(family: list[int], file_bytes: int, inherited: set[int]) -> int:
  """Bytes of the files that these processes hold open or mapped though no name is left.

  One that is mapped only counts as ``file_bytes``, the most that a file may have, where its size is
  for root alone to see. ``inherited`` inodes do not count. Some kernels let nobody look into a
  process that made itself unreadable; seccomp forbids that, as it does tables of descriptors that
  one thread has for itself.
  """
  found: dict[int, int] = {}  # by inode; programs write to one file system
  for pid in family:
    for shown in _threads(pid):
      descriptors = _open_deleted(shown)
      if descriptors is not None:  # else this thread has ended, and another one shows them
        found |= descriptors
        break
  for pid in family:
    for inode, place in _mapped_deleted(pid).items():
      if inode not in found and inode not in inherited:
        try:
          found[inode] = os.stat(place).st_blocks * 512
        except OSError:
          found[inode] = file_bytes
  return sum(found.values())


def _open_deleted(shown: str) -> dict[int, int] | None:
  """Bytes by inode; None where no descriptors are shown."""
  names, found = [], {}
  with contextlib.suppress(OSError):
    names = os.listdir(f"{shown}/fd")
  for fd in names:
    with contextlib.suppress(OSError):
      status = os.stat(f"{shown}/fd/{fd}")
      if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
        found[status.st_ino] = status.st_blocks * 512
  return found if names else None


def _mapped_deleted(pid: int | str) -> dict[int, str]:
  """Deleted files that a process has mapped: inode -> where /proc shows the file itself."""
  for shown in _threads(pid):
    with contextlib.suppress(OSError), open(f"{shown}/maps", errors="replace") as file:
      if text := file.read():
        lines = [line.split(maxsplit=5) for line in text.splitlines() if "(deleted)" in line]
        return {int(line[4]): f"/proc/{pid}/map_files/{line[0]}" for line in lines}
  return {}
