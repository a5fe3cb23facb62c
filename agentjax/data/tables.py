"""Rows of JSONL, Parquet and Arrow files, one by one, each with its number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl

_BATCH_ROWS = 1024  # rows that are in memory at once


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (number from 1, row) of a file or a folder of files.

  ``*.parquet`` is a Parquet file; a folder holds Parquet files, or the Arrow files of one split as
  ``datasets.Dataset.save_to_disk`` writes them, and is read in the order of their names. Any other
  name that is no file means ``NAME-*.parquet`` or ``data/NAME-*.parquet``. Everything else is
  JSONL. Fields of tables without a value are left out.

  Raises:
    ConfigError: the package pyarrow is missing.
    DataError: as ``read_jsonl``; a table that is damaged or has no rows.
  """
  name = Path(path)
  files = _tables(name)
  if files is None:
    yield from read_jsonl(path)
    return
  number = 0
  for file in files:
    try:
      for row in _table_rows(file):
        number += 1
        yield number, _without_none(row)
    except (OSError, _pyarrow().ArrowException) as error:
      raise DataError(f"cannot be read past row {number}: {error}", file) from error
  if number == 0:
    raise DataError("the table holds no rows", path)


def _tables(path: Path) -> list[Path] | None:
  """The Parquet or Arrow files that a name stands for; None where it is JSONL."""
  if path.is_dir():
    for pattern in ("*.parquet", "*.arrow"):
      if found := sorted(path.glob(pattern)):
        return found
    raise DataError("the folder holds no *.parquet and no *.arrow files", path)
  if path.exists():
    return [path] if path.suffix in (".parquet", ".arrow") else None
  for folder in (path.parent, path.parent / "data"):
    if found := sorted(folder.glob(f"{path.name}-*.parquet")):
      return found
  return None


def _table_rows(file: Path) -> Iterator[dict[str, Any]]:
  _pyarrow()
  if file.suffix == ".parquet":
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
      for batch in table.iter_batches(batch_size=_BATCH_ROWS):
        yield from batch.to_pylist()
    return
  import pyarrow.ipc

  with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as table:
    for batch in table:
      yield from batch.to_pylist()


def _without_none(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _without_none(v) for k, v in value.items() if v is not None}
  return [_without_none(v) for v in value] if isinstance(value, list) else value


def _pyarrow() -> ModuleType:
  try:
    import pyarrow
  except ImportError as error:
    raise ConfigError(
      'Parquet and Arrow files need the package pyarrow: pip install "agentjax[parquet]".'
    ) from error
  return pyarrow
