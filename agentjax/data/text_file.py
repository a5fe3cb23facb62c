"""The text of a file."""

from __future__ import annotations

import gzip
import os
import zlib

from agentjax.data.errors import DataError


def read_text(path: str | os.PathLike[str]) -> str:
  """The text of a UTF-8 file; ``.gz`` files are unpacked.

  Raises:
    DataError: no such file, bytes that are not UTF-8, damaged compression.
  """
  name = os.fspath(path)
  opened = gzip.open if name.endswith(".gz") else open
  try:
    with opened(name, "rt", encoding="utf-8") as stream:
      return stream.read()
  except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
    raise DataError(f"cannot be read as text: {error}", path) from error
