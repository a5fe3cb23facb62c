"""Where packed sequences begin and where padding is."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def starts(segment_ids: Array) -> Array:
  """Marks the first token of every sequence but the first of its row.

  Args:
    segment_ids: int [B, T], 0 at padding; padding may stand anywhere and starts nothing.

  Returns:
    bool [B, T].
  """
  real = segment_ids != 0
  place = jnp.arange(segment_ids.shape[1])
  # The last real token up to each place; -1 before the first.
  last = jax.lax.cummax(jnp.where(real, place, -1), axis=1)
  before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  return real & (before >= 0) & (previous != segment_ids)


def lengths(segment_ids: Array) -> Array:
  """Tokens up to and including the last real one, int32 [B]; 0 for a row of padding."""
  place = jnp.arange(1, segment_ids.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(jnp.where(segment_ids != 0, place, 0), axis=1)
