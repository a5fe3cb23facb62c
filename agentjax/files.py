"""Writing files and folders so that a reader never sees an incomplete one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, is damaged or does not fit; others are untouched."""


@contextlib.contextmanager
def written_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
  """A place for a new file or folder, which takes that of ``path`` when it is complete.

  Where the block raises, nothing of it stays and ``path`` is as before.

  Args:
    path: file, or folder that is absent or empty; its parent is made.
  """
  target = Path(path).absolute()
  target.parent.mkdir(parents=True, exist_ok=True)
  beside = target.with_name(f".{target.name}.{os.getpid()}")
  _remove(beside)  # of a process of this number that was killed
  try:
    yield beside
    os.replace(beside, target)
  finally:
    _remove(beside)


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
  """Writes a temporary file, syncs, renames it: a reader sees the old file or the complete new one.

  Args:
    path: file to write; its folder is made.
    data: text is written as UTF-8.
  """
  with written_beside(path) as beside, beside.open("wb") as file:
    file.write(data.encode() if isinstance(data, str) else data)
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def held(lock: str | os.PathLike[str], refusal: Exception) -> Iterator[None]:
  """Holds a lock file for this process; the kernel frees it when the process dies.

  Args:
    lock: the file; its folder is there.
    refusal: raised where another process holds it.
  """
  with Path(lock).open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise refusal from error
    yield


def check_empty(folder: str | os.PathLike[str]) -> Path:
  """The folder as a path; CheckpointError where something is in it."""
  target = Path(folder).absolute()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise CheckpointError(f"{target} is there already and not empty; give a new directory.")
  return target


def _remove(path: Path) -> None:
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=True)
  else:
    path.unlink(missing_ok=True)
