"""How the Pallas kernels see queries: those of a key head, of all its tokens, as one axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def to_rows(query: Array, kv_heads: int, length: int, width: int) -> Array:
  """[R, T, H, D] as [R, C, length, width] with zeros behind; query ``t G + g`` is of token t."""
  rows, time, heads, _ = query.shape
  query = query.reshape(rows, time, kv_heads, heads // kv_heads, -1)
  query = jnp.moveaxis(query, 2, 1).reshape(rows, kv_heads, time * heads // kv_heads, -1)
  spare = length - query.shape[2], width - query.shape[3]
  return jnp.pad(query, ((0, 0), (0, 0), (0, spare[0]), (0, spare[1])))


def from_rows(out: Array, time: int, heads: int, width: int) -> Array:
  """[R, C, length, ...] as [R, T, H, width]."""
  rows, kv_heads = out.shape[:2]
  shared = heads // kv_heads
  out = out[:, :, : time * shared, :width].reshape(rows, kv_heads, time, shared, width)
  return jnp.moveaxis(out, 1, 2).reshape(rows, time, heads, width)
