"""Wide columns of tokens, of several processes: only those whose devices train a token get them.

Columns that only devices read (``Column.device_only``), as the routers' choices, are many times
wider than all others together. A process keeps those of the episodes that it played. In the
episodes that all processes exchange, the number of the token stands in their place
(``columns.REFERENCE``). Packing moves these numbers like values. All processes then know which
token stands where, and each sends the others what their devices need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.training import processes
from agentjax.trajectory.columns import (
  NO_REFERENCE,
  REFERENCE,
  Column,
  ColumnError,
  join_known,
  registered_columns,
)
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import from_record, to_record

_STEP_BITS = 40  # tokens of a step; its number stands above them


class WideColumns:
  """The wide columns of one step's episodes; those of the step before are dropped."""

  def __init__(self) -> None:
    self._kinds: dict[str, np.ndarray] = {}  # by column an array [0, ...]
    self._values: dict[str, np.ndarray] = {}  # by column [own tokens, ...]
    self._first = np.zeros(1, np.uint64)  # number of each process's first token, and the end

  def gather(self, own: Sequence[Trajectory], step: int) -> list[Trajectory]:
    """As ``processes.gather_trajectories``, with references in the place of wide columns.

    Args:
      own: episodes of this process.
      step: for which they are gathered.
    """
    if jax.process_count() == 1:
      return list(own)
    records = [to_record(t) for t in own]
    self._kinds, self._values = {}, _take_out(records)
    parts = [part["records"] for part in processes.exchange({"records": records})]
    parts[jax.process_index()] = records  # they are here
    number, first, every = step << _STEP_BITS, [], []
    for part in parts:
      first.append(number)
      for record in part:
        number = self._refer(record, number)
        every.append(from_record(record))
    self._first = np.array([*first, number], np.uint64)
    return sorted(every, key=lambda t: t.address)

  def _refer(self, record: dict[str, Any], number: int) -> int:
    """Numbers the tokens of an episode from ``number`` on; the number after them."""
    for segment in record["segments"]:
      columns, end = segment["columns"], number + len(segment["columns"]["token_ids"])
      for column in _wide(columns):
        kind = self._kinds.setdefault(column.name, columns[column.name])
        found = columns[column.name]
        if (found.dtype, found.shape) != (kind.dtype, kind.shape):
          raise ColumnError(
            f"{column.name} is {kind.dtype}{list(kind.shape[1:])} in some episodes of a step and "
            f"{found.dtype}{list(found.shape[1:])} in others; allowed: one dtype and shape."
          )
        columns[column.name] = np.arange(number, end, dtype=np.uint64).view(REFERENCE)
      number = end
    return number

  def place(
    self, column: Column, references: np.ndarray, target: jax.sharding.Sharding
  ) -> jax.Array:
    """The values of a column on the mesh; all processes call this together.

    Args:
      column: of tokens.
      references: [B, T] of ``REFERENCE``, of episodes that were gathered last.
      target: where [B, T, ...] go.

    Raises:
      ColumnError: the episodes are of an earlier step.
    """
    numbers = references["token"]
    known = numbers[numbers != NO_REFERENCE]
    if known.size and (known.min() < self._first[0] or known.max() >= self._first[-1]):
      raise ColumnError(
        f"{column.name} of episodes of an earlier step is not here any more. A signal that keeps "
        "episodes must say so: set keeps_episodes = True in its class."
      )
    wanted = _wanted(numbers, target)
    mine, found = jax.process_index(), self._fetch(column.name, wanted)
    kind = self._kinds[column.name]

    def part(index: Any) -> np.ndarray:
      cells = numbers[index[:2]]
      values = np.full((*cells.shape, *kind.shape[1:]), column.fill_value(kind.dtype), kind.dtype)
      inside = cells != NO_REFERENCE
      values[inside] = found[np.searchsorted(wanted[mine], cells[inside])]
      return values

    shape = (*numbers.shape, *kind.shape[1:])
    return jax.make_array_from_callback(shape, target, part)

  def _fetch(self, name: str, wanted: Sequence[np.ndarray]) -> np.ndarray:
    """[n, ...] of the tokens that this process wants; it sends the others what they want."""
    kind, mine = self._kinds[name], jax.process_index()
    width = kind.dtype.itemsize * int(np.prod(kind.shape[1:]))
    ends = [np.searchsorted(numbers, self._first) for numbers in wanted]
    sizes = np.stack([np.diff(end) for end in ends], axis=1) * width  # from, to
    parts = []
    for numbers, end in zip(wanted, ends, strict=True):
      asked = (numbers[end[mine] : end[mine + 1]] - self._first[mine]).astype(np.int64)
      parts.append(self._values[name][asked] if asked.size else kind)
    own, parts[mine] = parts[mine], kind  # it is here
    np.fill_diagonal(sizes, 0)
    sent = processes.send([np.frombuffer(p.tobytes(), np.uint8) for p in parts], sizes)
    received = [np.frombuffer(s, kind.dtype).reshape(-1, *kind.shape[1:]) for s in sent]
    received[mine] = own
    return np.concatenate(received)


def _wide(columns: dict[str, np.ndarray]) -> list[Column]:
  return [c for c in registered_columns(core=False) if c.device_only and c.name in columns]


def _take_out(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
  """By wide column [tokens, ...], which are then empty in the records: dtype and shape stay."""
  segments = [segment for record in records for segment in record["segments"]]
  lengths = [len(segment["columns"]["token_ids"]) for segment in segments]
  taken = {}
  for column in registered_columns(core=False):
    parts = [segment["columns"].get(column.name) for segment in segments]
    if column.device_only and any(part is not None for part in parts):
      taken[column.name] = join_known(column, parts, lengths)
      for segment, part in zip(segments, parts, strict=True):
        if part is not None:
          segment["columns"][column.name] = part[:0]
  return taken


def _wanted(numbers: np.ndarray, target: jax.sharding.Sharding) -> list[np.ndarray]:
  """By process, in ascending order, the tokens that its devices hold."""
  held: list[set[tuple[tuple[int, int], ...]]] = [set() for _ in range(jax.process_count())]
  places: dict[Any, Any] = dict(target.devices_indices_map(numbers.shape))
  for device, index in places.items():
    bounds = (part.indices(size)[:2] for part, size in zip(index, numbers.shape, strict=True))
    held[device.process_index].add(tuple(bounds))
  wanted = []
  for blocks in held:
    parts = [numbers[a:b, c:d].ravel() for (a, b), (c, d) in sorted(blocks)]
    found = np.unique(np.concatenate([np.zeros(0, np.uint64), *parts]))
    wanted.append(found[found != NO_REFERENCE])
  return wanted
