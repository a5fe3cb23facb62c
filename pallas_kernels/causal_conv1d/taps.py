"""What implementations share: who sees whose input, and the edges of tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def seen_ahead(reach: Array, kept: int) -> Array:
  """How many tokens after its own see a token's input, int32 [B, T] of ``reach`` [B, T]."""
  time = reach.shape[1]
  ahead = jnp.pad(reach, ((0, 0), (0, kept)), constant_values=-1)
  sees = [ahead[:, j : j + time] >= j for j in range(1, kept + 1)]
  return sum((v.astype(jnp.int32) for v in sees), jnp.zeros_like(reach))


def before_tiles(x: Array, initial_tail: Array, tile: int) -> Array:
  """The K-1 inputs before every tile of ``tile`` tokens: [B, tiles, K-1, C]."""
  batch, time, channels = x.shape
  kept = initial_tail.shape[1]
  whole = (time - 1) // tile  # tiles that have one after them
  tails = x[:, : whole * tile].reshape(batch, whole, tile, channels)[:, :, tile - kept :]
  return jnp.concatenate([initial_tail[:, None], tails], axis=1) if whole else initial_tail[:, None]


def look_ahead(sums: Array, w: Array, reach: Array | None) -> Array:
  """Gradients of inputs, from those of the weighted sums that they are in.

  Args:
    sums: [B, T+K-1, C] gradients of the sums at the inputs and at K-1 tokens after them.
    w: [K, C].
    reach: int32 [B, T+K-1] of the same tokens, or None.

  Returns:
    [B, T, C].
  """
  kept = w.shape[0] - 1
  time = sums.shape[1] - kept
  total = w[kept] * _seen(sums[:, :time], reach, 0)
  for j in range(1, kept + 1):
    total = total + w[kept - j] * _seen(sums[:, j : j + time], reach, j)
  return total


def _seen(sums: Array, reach: Array | None, j: int) -> Array:
  if reach is None:
    return sums
  return jnp.where((reach[:, j : j + sums.shape[1]] >= j)[..., None], sums, 0.0)


def look_ahead_from_tail(first: Array, w: Array, reach: Array | None) -> Array:
  """Gradient of the initial tail.

  Args:
    first: [B, K-1, C] gradients of the first K-1 weighted sums, 0 past the end.
    w: [K, C].
    reach: int32 [B, T] or None.
  """
  kept = first.shape[1]
  if reach is not None:
    near = reach[:, :kept]
    reach = jnp.pad(near, ((0, 0), (kept, kept - near.shape[1])), constant_values=-1)
  return look_ahead(jnp.concatenate([jnp.zeros_like(first), first], axis=1), w, reach)
