"""One holder of a folder at a time, across threads and processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def held(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """The folder, made if there is none, for this caller only; waits for others.

  The kernel frees the lock when its process dies.
  """
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  with (path / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield path
