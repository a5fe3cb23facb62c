"""The error of wrong input data."""

from __future__ import annotations

import os


class DataError(ValueError):
  """Data that cannot be used; the message starts with ``path:line:`` as far as they are known."""

  def __init__(self, reason: str, path: str | os.PathLike[str], line: int | None = None):
    self.path = os.fspath(path)
    self.line = line
    self.reason = reason
    super().__init__(f"{self.path}:{'' if line is None else f'{line}:'} {reason}")
