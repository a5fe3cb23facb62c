"""Writing files so that a reader never sees an incomplete one."""

from __future__ import annotations

import os
from pathlib import Path


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, is damaged or does not fit; others are untouched."""


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
  """Writes a temporary file, syncs, renames it: a reader sees the old file or the complete new one.

  Args:
    path: file to write; its folder is made.
    data: text is written as UTF-8.
  """
  target = Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  beside = target.with_name(f".{target.name}.{os.getpid()}")
  try:
    with beside.open("wb") as file:
      file.write(data.encode() if isinstance(data, str) else data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(beside, target)
  finally:
    beside.unlink(missing_ok=True)
