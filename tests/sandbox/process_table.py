"""Finding processes that a test started, by a marker in their command line."""

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
