"""Finding processes that a test started: by a marker in their command line, or by descent."""

import contextlib
import os


def pids(marker: str) -> list[int]:
  """The processes of this machine with ``marker`` in their command line."""
  found = []
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline") as file:
        if marker in file.read():
          found.append(int(entry))
  return found


def alive(marker: str) -> bool:
  return bool(pids(marker))


def descendants(pid: int) -> list[int]:
  """All processes below ``pid``, parents first."""
  found, waiting = [], [pid]
  while waiting:
    parent = waiting.pop(0)
    with contextlib.suppress(OSError):
      for task in os.listdir(f"/proc/{parent}/task"):
        with open(f"/proc/{parent}/task/{task}/children") as file:
          waiting += (children := [int(child) for child in file.read().split()])
          found += children
  return found
