"""JSON lines: one object per line; errors name the line."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.data.errors import DataError


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (line number from 1, object) for each line; ``.gz`` files are unpacked on the way.

  Blank lines are allowed at the end only.

  Raises:
    DataError: no such file, a file without rows, bytes that are not UTF-8, a line that is not one
      JSON object (a line cut off by a torn download among them), damaged compression.
  """
  name = os.fspath(path)
  try:
    stream = gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb")
  except FileNotFoundError:
    raise DataError("no such file", path) from None
  except OSError as error:
    raise DataError(f"cannot be opened: {error.strerror}", path) from error
  line, blank = 0, None
  with stream:
    try:
      for line, raw in enumerate(stream, start=1):
        if not raw.strip():
          blank = blank or line
          continue
        if blank is not None:
          raise DataError("blank line between rows", path, blank)
        yield line, _parse(raw, path, line)
    except (OSError, EOFError, zlib.error) as error:
      raise DataError(f"cannot be read past here: {error}", path, line + 1) from error
  if line == 0 or blank == 1:
    raise DataError("the file holds no rows", path)


def require_text(
  row: Mapping[str, Any], field: str, path: str | os.PathLike[str], line: int
) -> str:
  """The text of a field; a number becomes its decimal text. DataError if it is missing."""
  if field not in row:
    raise DataError(f"the row has no {field!r}; its fields: {', '.join(row) or 'none'}", path, line)
  value = row[field]
  if isinstance(value, int | float) and not isinstance(value, bool):
    return f"{value:.15g}" if isinstance(value, float) else str(value)
  if not isinstance(value, str):
    raise DataError(f"{field!r} is a {type(value).__name__}; allowed: text", path, line)
  if not value.strip():
    raise DataError(f"{field!r} is empty", path, line)
  return value


def _parse(raw: bytes, path: str | os.PathLike[str], line: int) -> dict[str, Any]:
  try:
    row = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
  except UnicodeDecodeError as error:
    raise DataError(f"not UTF-8 at byte {error.start} of the line", path, line) from error
  except json.JSONDecodeError as error:
    raise DataError(f"not JSON: {error.msg} at column {error.colno}", path, line) from error
  except (ValueError, RecursionError) as error:
    raise DataError(f"not JSON: {error}", path, line) from error
  if not isinstance(row, dict):
    raise DataError(f"the row is a JSON {type(row).__name__}; allowed: an object", path, line)
  return row


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not part of JSON")
