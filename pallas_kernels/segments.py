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


def cut(
  segment_ids: Array | None, lengths: Array | None, time: int
) -> tuple[Array | None, Array | None]:
  """Segment ids with 0 beyond ``lengths``, and which tokens are real; None where all are.

  Args:
    segment_ids: int [B, T] or None. lengths: int [B] or None.
    time: T.
  """
  inside = None if lengths is None else jnp.arange(time) < lengths[:, None]
  if segment_ids is None:
    return None, inside
  if inside is not None:
    segment_ids = jnp.where(inside, segment_ids, 0)
  return segment_ids, jnp.not_equal(segment_ids, 0)
