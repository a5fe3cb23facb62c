"""The output folder of a synthesis: each row is written once, as soon as it is made.

settings.json   what the rows were made with; a folder holds those of one setting
NAME.jsonl      rows, each with the ``id`` of what it was made for
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agentjax.config import ConfigError, differing_fields
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.files import write_atomically
from agentjax.trajectory.record import Message

SETTINGS = "settings.json"
GIVEN_UP = "given_up.jsonl"


class Numbered(Protocol):
  """What a row is made for."""

  @property
  def id(self) -> int: ...


T = TypeVar("T", bound=Numbered)
Row = dict[str, Any]
Report = Callable[[str, int, int], None]  # what is being made, how much is there, of how much


def unreported(what: str, done: int, total: int) -> None:
  """A ``Report`` that does nothing."""


def claim(
  folder: str | os.PathLike[str], settings: Mapping[str, Any], names: Sequence[str]
) -> pathlib.Path:
  """The folder, made if it is not there, for rows of these settings.

  Args:
    folder: new, empty, or of an earlier call.
    settings: plain JSON; an earlier call must have had the same.
    names: files that it will hold.

  Raises:
    ConfigError: it was made with other settings, or holds such files without any.
    DataError: its settings are damaged.
  """
  directory = pathlib.Path(folder)
  directory.mkdir(parents=True, exist_ok=True)
  file = directory / SETTINGS
  wanted = json.loads(json.dumps(settings))
  if file.exists():
    try:
      present = json.loads(file.read_bytes())
    except ValueError as error:
      raise DataError(f"is damaged: {error}", file) from error
    if not isinstance(present, dict):
      raise DataError(f"is damaged: it holds a {type(present).__name__}, not an object", file)
    if differences := "; ".join(differing_fields(present, wanted, "settings")):
      raise ConfigError(
        f"{directory} was made with other settings: {differences}. Give another folder or the same "
        "settings."
      )
  elif any((directory / name).exists() for name in names):
    raise ConfigError(f"{directory} holds other files; allowed: a new or an empty folder.")
  else:
    write_atomically(file, json.dumps(wanted, indent=2) + "\n")
  return directory


class RowFile:
  """A JSONL file of rows with ids that grows by whole lines.

  Args:
    path: a line that was cut off at its end is removed.
    fields: with their types, that every row has beside its ``id``.
    other: says for which other input a row was made, or None.

  Attributes:
    rows: by id.

  Raises:
    ConfigError: rows that were made for something else.
    DataError: the file is damaged.
  """

  def __init__(
    self,
    path: pathlib.Path,
    fields: Mapping[str, type],
    other: Callable[[Row], str | None] = lambda row: None,
  ):
    self._path = path
    self.rows: dict[int, Row] = {}
    if not path.exists():
      return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):  # a line that was cut off as the process died
      write_atomically(path, whole)
    for line, row in read_jsonl(path) if whole else ():
      for name, kind in {"id": int, **fields}.items():
        if not isinstance(row.get(name), kind):
          raise DataError(f"the row has no {name!r} that is a {kind.__name__}", path, line)
      if (difference := other(row)) is not None:
        raise ConfigError(f"{path}:{line}: {difference}; other tasks need another folder.")
      self.rows[row["id"]] = row

  def append(self, row: Row) -> None:
    """The row is on the disk when this returns."""
    line = _line(row)
    with self._path.open("ab") as file:
      file.write(line)
      file.flush()
      os.fsync(file.fileno())
    self.rows[row["id"]] = json.loads(line)  # as a later call will read it

  def sort(self) -> None:
    """Puts the rows in the order of their ids."""
    if list(self.rows) != sorted(self.rows):
      write_atomically(self._path, b"".join(_line(self.rows[i]) for i in sorted(self.rows)))
      self.rows = {i: self.rows[i] for i in sorted(self.rows)}


async def fill(
  files: Sequence[RowFile],
  items: Iterable[T],
  work: Callable[[T], Awaitable[None]],
  *,
  what: str,
  report: Report,
  concurrency: int,
) -> None:
  """``work(item)`` for every item of which no file has a row; then all rows are sorted by id.

  Args:
    files: that ``work`` appends to.
    items: with ids of their own.
    work: makes a row; the first error ends them all.
    what: is being made, for ``report``.
    report: told as it begins, and after each item.
    concurrency: items at once.
  """
  settled = {i for file in files for i in file.rows}
  rest = [item for item in items if item.id not in settled]
  left, done, total = iter(rest), len(settled), len(settled) + len(rest)
  report(what, done, total)

  async def worker() -> None:
    nonlocal done
    for item in left:
      await work(item)
      done += 1
      report(what, done, total)

  workers = [asyncio.ensure_future(worker()) for _ in range(concurrency)]
  try:
    await asyncio.gather(*workers)
  finally:
    for one in workers:
      one.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
  for file in files:
    file.sort()


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
  """Messages without calls as a row holds them."""
  return [{"role": message.role, "content": message.content} for message in messages]


def _line(row: Row) -> bytes:
  return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
