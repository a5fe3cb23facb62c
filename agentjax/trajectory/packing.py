"""Packing: many sequences into few rows, without splitting any, and back.

First-fit decreasing: longest sequence first, each into the first row with room (at most 11/9 of the
fewest rows possible, plus one; Johnson 1973). Ties go by index, so the same list packs the same
way. The number of a sequence does not depend on its row: ``segment_ids`` are 1 + its index in the
list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from agentjax.trajectory.batch import Batch
from agentjax.trajectory.builder import TokenPath, token_paths
from agentjax.trajectory.columns import (
  Column,
  core_fields,
  find_column,
  get_column,
  join_known,
  known_names,
  value_or_fill,
)
from agentjax.trajectory.record import BRANCHES, Trajectory


class PackingError(ValueError):
  """Sequences that do not fit the rows or the places given."""


@dataclasses.dataclass(frozen=True)
class PackedSequence:
  """One sequence on its way into a batch.

  Attributes:
    name: where it comes from, for messages.
    token_ids, versions, turns: int32 [n]. weights, behaviour_log_probs, entropies: float32 [n].
    reward: value, 0 where not valid. valid: whether it is one.
    group: id of the group for group statistics, >= 0.
    columns: further columns by name: [n, ...] of tokens and turns, [...] of sequences. Names that
      are not registered do not get into a batch.
    source: name of the data set of its task.
  """

  name: str
  token_ids: np.ndarray
  weights: np.ndarray
  behaviour_log_probs: np.ndarray
  entropies: np.ndarray
  versions: np.ndarray
  turns: np.ndarray
  reward: float = 0.0
  valid: bool = True
  group: int = 0
  columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  source: str = ""

  def __len__(self) -> int:
    return len(self.token_ids)

  def column(self, name: str) -> np.ndarray:
    """[n, ...] of a column of tokens or turns, [...] of sequences; its fill where there is none."""
    column = find_column(name)
    of_sequence = column is not None and column.level == "sequence"
    return value_or_fill(self.columns, name, () if of_sequence else (len(self),))

  def with_columns(self, values: Mapping[str, np.ndarray]) -> Self:
    """A copy with these columns added or replaced."""
    return dataclasses.replace(self, columns={**self.columns, **values})


@dataclasses.dataclass(frozen=True)
class RowPlan:
  """Where each of N sequences goes: int64 ``rows`` [N] (-1 for an empty one), ``starts`` [N]."""

  rows: np.ndarray
  starts: np.ndarray
  num_rows: int


def to_sequences(trajectories: Sequence[Trajectory]) -> list[PackedSequence]:
  """One sequence a leaf, trajectories in the order given, leaves in theirs.

  A trajectory without segments, whose episode ended before its prompt, gives none.

  Members of one group have the same step, source and group key (the task where there is none);
  groups are numbered as they first appear. A token shared by several leaves has its weight on the
  first (see ``token_paths``). All leaves of a trajectory carry its reward, which is not valid where
  the infrastructure or the verifier failed.
  """
  groups: dict[tuple[int, str, str], int] = {}
  segments: dict[tuple[int, int, str, int, int], int] = {}
  result = []
  for trajectory in trajectories:
    group = groups.setdefault(trajectory.advantage_group, len(groups))
    step, task_id, sample = trajectory.address
    branches = trajectory.metadata.get(BRANCHES)
    for tokens in token_paths(trajectory):
      columns = {**tokens.columns, **trajectory.columns}
      if branches is not None:
        columns["branches"] = _shared(trajectory, branches, tokens, segments)
      result.append(
        PackedSequence(
          name=f"step={step}, task={task_id}, sample={sample}, leaf={tokens.segments[-1]}",
          reward=trajectory.reward.value if trajectory.reward.value is not None else 0.0,
          valid=trajectory.usable,
          group=group,
          columns=columns,
          source=trajectory.source,
          **{c.name: getattr(tokens, c.name) for c in core_fields(PackedSequence, "token")},
        )
      )
  return result


def at_turn_ends(trajectory: Trajectory, name: str, paid: Sequence[float | None]) -> Trajectory:
  """A copy with a column of tokens: what each segment was paid, on its last token.

  All others have the column's fill. What a segment without tokens was paid stands on the last token
  before it.

  Args:
    trajectory: of any number of branches.
    name: of a registered column.
    paid: one a segment, as in ``Trajectory.turn_rewards``.
  """
  column, segments = get_column(name), trajectory.segments
  values = [column.filled((len(segment),)) for segment in segments]
  for i, value in enumerate(paid):
    at: int | None = i if value is not None else None
    while at is not None and not len(segments[at]):
      at = segments[at].parent
    if at is not None:
      values[at][-1] = value + np.nan_to_num(values[at][-1])
  changed = [s.with_columns({name: v}) for s, v in zip(segments, values, strict=True)]
  return dataclasses.replace(trajectory, segments=changed)


def without_prompt(sequence: PackedSequence) -> PackedSequence | None:
  """The sequence without the tokens between its first token and its first weighted one.

  Its first token, the start of every conversation, is kept, and positions count from there.
  Observations between later turns are kept, without weight. Columns that depend on the prompt
  (``Column.conditional``) are dropped; behaviour log-probs become 0. None if no token has weight.
  """
  weighted = np.flatnonzero(sequence.weights[1:] > 0)
  if not weighted.size:
    return None
  kept = np.r_[0, np.arange(weighted[0] + 1, len(sequence))]
  arrays: dict[str, Any] = {}
  for column in core_fields(PackedSequence, "token"):
    values = getattr(sequence, column.name)[kept]
    arrays[column.name] = (
      np.full_like(values, column.fill_value()) if column.conditional else values
    )
  extra = {}
  for column in known_names([sequence.columns], "token", "turn", "sequence"):
    values = sequence.columns[column.name]
    if not column.conditional:
      extra[column.name] = values if column.level == "sequence" else values[kept]
  return dataclasses.replace(
    sequence,
    **arrays,
    columns=extra,
  )


def _shared(
  trajectory: Trajectory,
  branches: Sequence[int],
  tokens: TokenPath,
  segments: dict[tuple[int, int, str, int, int], int],
) -> np.ndarray:
  """int32 [n], a number for the segment of every token, the same in all that share it.

  ``segments`` numbers them by step, task, group, branch and index, from 1 on.
  """
  step, task_id, _ = trajectory.address
  numbers = {
    i: segments.setdefault((step, task_id, trajectory.group, branches[i], i), len(segments) + 1)
    for i in tokens.segments
  }
  lengths = [len(trajectory.segments[i]) for i in tokens.segments]
  return np.repeat(np.array([numbers[i] for i in tokens.segments], np.int32), lengths)


def plan_rows(lengths: Sequence[int] | np.ndarray, row_length: int, align: int = 1) -> RowPlan:
  """First-fit decreasing of sequences of these lengths into rows of ``row_length`` tokens.

  Every sequence starts at a multiple of ``align`` in its row.

  Raises:
    PackingError: a sequence is longer than a row.
  """
  sizes = np.asarray(lengths, np.int64)
  if sizes.size and sizes.max() > row_length:
    i = int(np.argmax(sizes > row_length))
    raise PackingError(
      f"sequence {i} has {sizes[i]} tokens, row_length={row_length}; raise row_length."
    )
  rows = np.full(len(sizes), -1, np.int64)
  starts = np.zeros(len(sizes), np.int64)
  room = np.full(len(sizes), row_length, np.int64)  # never more rows than sequences
  used = 0
  for i in np.argsort(-sizes, kind="stable").tolist():
    size = int(sizes[i])
    if size == 0:
      break  # sorted: only empty ones are left
    row = int((room >= size).argmax())
    rows[i] = row
    starts[i] = row_length - room[row]
    room[row] -= -(-size // align) * align
    used = max(used, row + 1)
  return RowPlan(rows=rows, starts=starts, num_rows=used)


def pack(
  sequences: Sequence[PackedSequence],
  *,
  row_length: int,
  pad_id: int,
  rows: int | None = None,
  max_sequences: int | None = None,
  align: int = 1,
) -> Batch:
  """Packs sequences into a Batch of numpy arrays [rows, row_length] and [max_sequences].

  The first token of a sequence has nothing before it to be predicted from: its weight, log-prob and
  entropy are 0 in the batch, and it has the fill of every other ``predicted`` column. Padding has
  ``pad_id`` and the fill of each column, as have tokens and sequences of which it is not known.

  Args:
    sequences: in the order of the [N] arrays; a sequence without tokens keeps its place.
    row_length: tokens a row. pad_id: id of padding.
    rows: number of rows, padded with empty ones; None takes as many as ``plan_rows`` says.
    max_sequences: N, padded with unused places (valid False, group -1); None means no padding.
    align: every sequence starts at a multiple of it in its row.

  Raises:
    PackingError: no sequence; one longer than a row; more rows or sequences than allowed; a reward
      that is marked valid and not finite.
  """
  count = len(sequences)
  if not count:
    raise PackingError("nothing to pack: got no sequence.")
  places = count if max_sequences is None else max_sequences
  if count > places:
    raise PackingError(
      f"{count} sequences for max_sequences={places}; raise max_sequences or give fewer."
    )
  lengths = np.array([len(s) for s in sequences], np.int64)
  for sequence in sequences:
    _check_sequence(sequence, row_length)
  plan = plan_rows(lengths, row_length, align)
  num_rows = plan.num_rows if rows is None else rows
  if plan.num_rows > num_rows:
    raise PackingError(
      f"{count} sequences of {int(lengths.sum())} tokens need {plan.num_rows} rows of "
      f"row_length={row_length}, got rows={num_rows}; raise rows or row_length."
    )
  within = _ranges(lengths)
  cells = np.repeat(plan.rows * row_length + plan.starts, lengths) + within
  first = within == 0

  # Any: numpy stands in for jax arrays until the caller puts the batch on devices.
  def grid(values: np.ndarray, fill: int | float, dtype: DTypeLike) -> Any:
    flat: Any = np.full((num_rows * row_length, *values.shape[1:]), fill, dtype)
    flat[cells] = values
    return flat.reshape(num_rows, row_length, *values.shape[1:])

  def lay(column: Column, values: np.ndarray) -> Any:
    fill = column.fill_value(values.dtype)
    if column.predicted:
      values = values.copy()
      values[first] = fill
    return grid(values, fill, values.dtype)

  made: dict[str, Any] = {
    "segment_ids": grid(np.repeat(np.arange(1, count + 1), lengths), 0, np.int32),
    "positions": grid(within, 0, np.int32),
    "token_ids": grid(_joined(sequences, "token_ids"), pad_id, np.int32),
  }
  outcomes = _outcomes(sequences)
  for column in core_fields(Batch):
    name = column.name
    if column.level == "sequence":
      made[name] = _of_sequences(column, outcomes[name], places)
    elif name not in made:
      made[name] = lay(column, _joined(sequences, name).astype(column.dtypes[0], copy=False))
  columns = {
    column.name: _of_sequences(column, parts, places)
    if column.level == "sequence"
    else lay(column, join_known(column, parts, lengths.tolist()))
    for column, parts in _parts(sequences)
  }
  return Batch(**made, columns=columns)


def _check_sequence(sequence: PackedSequence, row_length: int) -> None:
  if len(sequence) > row_length:
    raise PackingError(
      f"the sequence ({sequence.name}) has {len(sequence)} tokens, row_length={row_length}; "
      "raise row_length or lower the limit on tokens of an episode."
    )
  if sequence.valid and not np.isfinite(sequence.reward):
    raise PackingError(
      f"the sequence ({sequence.name}) has reward {sequence.reward} marked valid; allowed: a "
      "finite value, or valid=False."
    )


def _joined(sequences: Sequence[PackedSequence], name: str) -> np.ndarray:
  """[all tokens] of a core column."""
  parts = [getattr(s, name) for s in sequences]
  for sequence, part in zip(sequences, parts, strict=True):
    if part.shape != (len(sequence),):
      raise PackingError(
        f"the sequence ({sequence.name}) has {name} of shape {part.shape} for {len(sequence)} "
        "token ids; allowed: one number a token."
      )
  return np.concatenate(parts)


def _outcomes(sequences: Sequence[PackedSequence]) -> dict[str, list[Any]]:
  """The core columns of sequences."""
  return {
    "rewards": [s.reward if s.valid else 0.0 for s in sequences],
    "valid": [s.valid for s in sequences],
    "groups": [s.group for s in sequences],
  }


def _parts(
  sequences: Sequence[PackedSequence],
) -> Iterator[tuple[Column, list[np.ndarray | None]]]:
  """The registered columns that some sequence has, with each sequence's values."""
  held = [s.columns for s in sequences]
  for column in known_names(held, "token", "turn", "sequence"):
    yield column, [columns.get(column.name) for columns in held]


def _of_sequences(column: Column, values: Sequence[Any], places: int) -> Any:
  """[places, ...], the fill where a value is None and in unused places."""
  parts = [None if value is None else column.cast(value)[None] for value in values]
  unused = places - len(parts)
  return join_known(column, [*parts, *[None] * unused], [1] * places)


def unpack(values: ArrayLike, segment_ids: ArrayLike, num_sequences: int) -> list[np.ndarray]:
  """Per-token values [B, T, ...] of a batch as one array [n, ...] a sequence, in their order.

  An unused place, or a sequence without tokens, gives an empty array.
  """
  grid, numbers = np.asarray(values), np.asarray(segment_ids)
  if grid.shape[:2] != numbers.shape:
    raise PackingError(
      f"values {grid.shape} do not start with the shape {numbers.shape} of segment_ids."
    )
  flat = grid.reshape(numbers.size, *grid.shape[2:])
  numbers = numbers.reshape(-1)
  order = np.argsort(numbers, kind="stable")  # a sequence lies in one row, so its order stays
  ends = np.cumsum(np.bincount(numbers, minlength=num_sequences + 1))
  if len(ends) != num_sequences + 1:
    raise PackingError(
      f"segment_ids go up to {len(ends) - 1}, num_sequences={num_sequences}; give the batch's."
    )
  return [flat[order[a:b]] for a, b in zip(ends[:-1], ends[1:], strict=True)]


def repack(values: Sequence[ArrayLike], segment_ids: ArrayLike, fill: float = 0.0) -> np.ndarray:
  """Inverse of ``unpack``: arrays [n, ...] onto the grid [B, T, ...], ``fill`` on padding."""
  numbers = np.asarray(segment_ids)
  counts = np.bincount(numbers.reshape(-1), minlength=len(values) + 1)[1:]
  arrays = [np.asarray(v) for v in values]
  sizes = np.array([len(a) for a in arrays], np.int64)
  if len(counts) != len(values) or (counts != sizes).any():
    raise PackingError(
      f"values of lengths {sizes.tolist()} do not match the batch's sequences of lengths "
      f"{counts.tolist()}."
    )
  joined = np.concatenate(arrays)
  result = np.full((numbers.size, *joined.shape[1:]), fill, joined.dtype)
  order = np.argsort(numbers.reshape(-1), kind="stable")
  result[order[numbers.size - len(joined) :]] = joined
  return result.reshape(*numbers.shape, *joined.shape[1:])


def _ranges(lengths: np.ndarray) -> np.ndarray:
  """0..n-1 for each length n, joined."""
  return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
