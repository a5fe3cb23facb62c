"""Sums and means over index sets of packed rows: token, turn, sequence, or any runs of your own.

An index set is an int32 array ``units [B, T]``: tokens with one positive id in one row form a unit,
0 belongs to none. Ids count from 1 within a row, so every reduction stays inside its row and a row
means the same in any micro-batch or shard. Reductions gather, reduce and scatter back: the result
has the value of its unit at every token and 0 outside all units.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Level = Literal["token", "turn", "sequence"]


def runs(*keys: Int[Array, "batch time"], inside: Bool[Array, "batch time"]) -> Array:
  """Numbers the runs of a row along which every key is constant: the general index set.

  Args:
    keys: int [B, T] each; a run ends where any of them changes.
    inside: bool [B, T], tokens outside get unit 0 and end the run they interrupt.

  Returns:
    int32 [B, T], 1, 2, ... from left to right in every row; 0 outside.
  """
  starts = inside & jnp.concatenate([jnp.ones_like(inside[:, :1]), ~inside[:, :-1]], axis=1)
  for key in keys:
    changes = jnp.concatenate([jnp.ones_like(inside[:, :1]), key[:, 1:] != key[:, :-1]], axis=1)
    starts = starts | (inside & changes)
  return jnp.where(inside, jnp.cumsum(starts.astype(jnp.int32), axis=1), 0)


def sequence_units(segment_ids: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
  """One unit a sequence (a sequence is contiguous and never split across rows)."""
  return runs(segment_ids, inside=segment_ids > 0)


def turn_units(
  segment_ids: Int[Array, "batch time"], turns: Int[Array, "batch time"]
) -> Int[Array, "batch time"]:
  """One unit a turn: the tokens of one model call with the observation that follows it.

  Weights decide which tokens of a turn count, so observations do not enter its means. Any int array
  that is constant on your chunks and changes between neighbours may stand in for ``turns``.
  """
  return runs(segment_ids, turns, inside=segment_ids > 0)


def units_of(
  level: Level,
  segment_ids: Int[Array, "batch time"],
  turns: Int[Array, "batch time"] | None,
) -> Int[Array, "batch time"]:
  """The index set of a named level; ``turns`` is needed by "turn" only."""
  if level == "sequence":
    return sequence_units(segment_ids)
  if level == "turn":
    if turns is None:
      raise ValueError('level "turn" needs turns [B, T]; pass batch.turns, or use level "token".')
    return turn_units(segment_ids, turns)
  if level == "token":
    time = segment_ids.shape[1]
    positions = jnp.arange(1, time + 1, dtype=jnp.int32)
    return jnp.where(segment_ids > 0, positions, 0)
  raise ValueError(f'level={level!r}; allowed: "token", "turn", "sequence".')


def unit_sum(
  values: Float[Array, "batch time"], units: Int[Array, "batch time"]
) -> Float[Array, "batch time"]:
  """Sum over the unit of every token; 0 outside units. Differentiable in ``values``."""
  places = units.shape[1] + 1

  def one_row(row: Array, ids: Array) -> Array:
    return jax.ops.segment_sum(row, ids, places)[ids]

  return jnp.where(units > 0, jax.vmap(one_row)(values, units), 0)


def unit_mean(
  values: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  units: Int[Array, "batch time"],
) -> Float[Array, "batch time"]:
  """``sum(w x) / sum(w)`` over the unit of every token; 0 where the unit has no weight."""
  # Values of weight 0 may be anything, also inf or NaN: they must not reach the sum.
  total = unit_sum(jnp.where(weights > 0, weights * values, 0), units)
  weight = unit_sum(weights, units)
  return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)


def unit_min(
  values: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  units: Int[Array, "batch time"],
) -> Float[Array, "batch time"]:
  """Minimum over the weighted tokens of the unit; +inf where it has none."""
  places = units.shape[1] + 1

  def one_row(row: Array, ids: Array) -> Array:
    return jax.ops.segment_min(row, ids, places)[ids]

  inside = (units > 0) & (weights > 0)
  masked = jnp.where(inside, values, jnp.inf)
  return jnp.where(units > 0, jax.vmap(one_row)(masked, units), jnp.inf)


def first_of_unit(
  weights: Float[Array, "batch time"], units: Int[Array, "batch time"]
) -> Bool[Array, "batch time"]:
  """True at the first weighted token of every unit."""
  return _edge(weights, units, reverse=False)


def last_of_unit(
  weights: Float[Array, "batch time"], units: Int[Array, "batch time"]
) -> Bool[Array, "batch time"]:
  """True at the last weighted token of every unit."""
  return _edge(weights, units, reverse=True)


def _edge(weights: Array, units: Array, *, reverse: bool) -> Array:
  inside = (weights > 0) & (units > 0)
  positions = jnp.arange(units.shape[1], dtype=jnp.float32)
  signed = jnp.broadcast_to(-positions if reverse else positions, units.shape)
  return inside & (signed == unit_min(signed, weights, units))


def sequence_sum(
  values: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  num_sequences: int,
) -> Float[Array, "sequences"]:
  """Sum a sequence over the whole batch, [N]; place i is the sequence with segment id i + 1."""
  sums = jax.ops.segment_sum(values.ravel(), segment_ids.ravel(), num_sequences + 1)
  return sums[1:]


def broadcast_to_tokens(
  values: Float[Array, "sequences"], segment_ids: Int[Array, "batch time"]
) -> Float[Array, "batch time"]:
  """Gives every token the value of its sequence; 0 on padding."""
  return jnp.where(segment_ids > 0, values[jnp.maximum(segment_ids - 1, 0)], 0)
