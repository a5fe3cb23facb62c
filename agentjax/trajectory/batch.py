"""The one structure that reaches the device: packed rows, data a token and data a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from agentjax.trajectory.columns import Column, absent_column, core_fields, get_column

Array = jax.Array


@flax.struct.dataclass
class Batch:
  """Packed rows. Everything per token is aligned with the token itself.

  ``behaviour_log_probs[b, t]`` is log p(token_ids[b, t] | earlier tokens of its sequence) and is 0
  on the first token of a sequence, whose weight is 0. Sequences are never split across rows.

  Attributes:
    token_ids: int32 [B, T].
    segment_ids: int32 [B, T], 0 on padding, else 1 + index of the sequence in the whole batch
      (the index into the [N] arrays below), so one array masks attention, resets recurrent state
      and groups tokens for reductions.
    positions: int32 [B, T], restart at 0 in every sequence.
    weights: float32 [B, T], loss weight of the token as a target; 0 on prompts, tools, padding.
    behaviour_log_probs, entropies: float32 [B, T], under the sampler, nats.
    versions: int32 [B, T], weight version that sampled the token, -1 elsewhere.
    turns: int32 [B, T], index of the model call in its sequence, -1 on padding.
    rewards: float32 [N]; 0 where not valid. valid: bool [N], False for invalid rewards and for
      unused sequence places.
    groups: int32 [N], group id for group statistics; -1 for unused places.
    columns: by name the other registered columns that one of the sequences has: [B, T, ...] of
      tokens and turns, [N, ...] of sequences.
  """

  token_ids: Array
  segment_ids: Array
  positions: Array
  weights: Array
  behaviour_log_probs: Array
  entropies: Array
  versions: Array
  turns: Array
  rewards: Array
  valid: Array
  groups: Array
  columns: dict[str, Array] = dataclasses.field(default_factory=dict)

  def column(self, name: str) -> Array:
    """[B, T, ...] or [N, ...] of a column, its fill where no sequence has one.

    Raises:
      ColumnError: no such column, or one that no sequence has and whose shape the data decides.
    """
    column = get_column(name)
    if column.core:
      return getattr(self, name)
    of_sequence = column.level == "sequence"
    rows = (self.num_sequences,) if of_sequence else self.token_ids.shape
    return column_or_fill(self.columns, name, rows)

  def with_columns(self, values: Mapping[str, Any]) -> Batch:
    """With these columns beside its own, or in the place of its own."""
    core = {name: value for name, value in values.items() if get_column(name).core}
    others = {name: value for name, value in values.items() if name not in core}
    return dataclasses.replace(self, **core, columns={**self.columns, **others})

  def without(self, *names: str) -> Batch:
    """Without these columns, where it has them."""
    return dataclasses.replace(
      self, columns={name: values for name, values in self.columns.items() if name not in names}
    )

  def for_loss(self) -> Batch:
    """Without the columns that losses are not given."""
    return self.without(*(name for name in self.columns if not get_column(name).in_loss))

  @property
  def num_sequences(self) -> int:
    """N, static: places for sequences, some of which may be unused."""
    return self.rewards.shape[0]


def filled_batch(rows: int, time: int, sequences: int) -> Batch:
  """A batch of numpy arrays of which nothing is known: every core column has its fill.

  Args:
    rows, time: B and T.
    sequences: N.
  """
  arrays: dict[str, Any] = {
    column.name: column.filled((sequences,) if column.level == "sequence" else (rows, time))
    for column in core_fields(Batch)
  }
  return Batch(**arrays)


def abstract_batch(rows: int, time: int, sequences: int) -> Batch:
  """Shapes and dtypes of ``filled_batch``."""
  batch = filled_batch(rows, time, sequences)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def abstract_column(batch: Batch, column: Column) -> Any:
  """Shape and dtype of a column of a batch of shapes and dtypes.

  Args:
    batch: ``abstract_batch``.
    column: that is to be added.

  Raises:
    ColumnError: data decide its shape.
  """
  rows = batch.rewards.shape if column.level == "sequence" else batch.token_ids.shape
  return jax.ShapeDtypeStruct((*rows, *column.sizes), column.dtypes[0])


def token_columns(batch: Batch) -> dict[str, Array]:
  """[B, T, ...] of the further columns; a sequence's value stands on all its tokens."""
  result = {}
  for name, values in batch.columns.items():
    column = get_column(name)
    if column.level == "sequence":
      inside = jnp.expand_dims(batch.segment_ids > 0, tuple(range(2, values.ndim + 1)))
      spread = jnp.asarray(values)[jnp.maximum(batch.segment_ids - 1, 0)]
      values = jnp.where(inside, spread, jnp.asarray(column.fill_value(), values.dtype))
    result[name] = values
  return result


def column_or_fill(columns: Mapping[str, Array], name: str, rows: tuple[int, ...]) -> Array:
  """The array of a column, or one [*rows, ...] in which nothing is known.

  Raises:
    ColumnError: as ``absent_column``, or one that is not there and whose shape the data decides.
  """
  if name in columns:
    return columns[name]
  column = absent_column(name)
  return jnp.full((*rows, *column.sizes), column.fill_value(), column.dtypes[0])
