"""Paged attention in XLA: tiles of pages, gathered one after the other.

R rows, T queries a row, H heads, C key heads, G = H / C, S tokens a page, N pages a tile, D and V
widths of keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

# Finite: exp gives exactly 0 for what is masked, and a tile without a key to see leaves no NaN.
MASKED = -1e30
# Tokens that are read at once, in whole pages, of which one may be larger; ours.
TILE = 256


class _Sums(NamedTuple):
  """A softmax over part of the keys, [R, C, G T, ...] in the dtype of the sums."""

  top: Array  # largest score
  total: Array  # sum of exp(score - top)
  out: Array  # sum of exp(score - top) * value


def paged_attention(
  query: Array,
  keys: Array,
  values: Array | None,
  key_scales: Array | None,
  value_scales: Array | None,
  page_table: Array,
  starts: Array,
  counts: Array,
  scale: float,
  window: int | None,
  value_dim: int,
) -> Array:
  """A running maximum and sum over tiles, from the first that a row sees to the last.

  What a row does not see adds an exact zero: its bits depend neither on the other rows nor on where
  the loop begins and ends.
  """
  rows, time, heads, _ = query.shape
  kv_heads, page = keys.shape[1:3]
  pages = min(max(TILE // page, 1), page_table.shape[1])
  tile = pages * page
  tiles = -(-page_table.shape[1] // pages)
  page_table = jnp.pad(page_table, ((0, 0), (0, tiles * pages - page_table.shape[1])))
  ends = jnp.where(counts > 0, starts + counts, 0)
  # The first place that the first query of a row sees.
  begins = jnp.zeros_like(starts) if window is None else jnp.maximum(starts - (window - 1), 0)
  at = starts[:, None] + jnp.arange(time)
  grouped = jnp.moveaxis(query, 1, 2).reshape(rows, kv_heads, -1, query.shape[-1])

  def join(i: Array | int, sums: _Sums | None) -> _Sums:
    """With tile i; alone it is one softmax."""
    table = jax.lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1)
    place = i * tile + jnp.arange(tile)
    live = (place >= begins[:, None]) & (place < ends[:, None])
    seen = place <= at[..., None]
    if window is not None:
      seen &= place > at[..., None] - window
    seen = jnp.tile(seen, (1, heads // kv_heads, 1))[:, None]

    key = gather(keys, table)
    # Zeros for what no query of the row sees: 0 * NaN would be NaN.
    value = key[..., :value_dim] if values is None else gather(values, table)
    value = jnp.where(live[:, None, :, None], value, jnp.zeros((), value.dtype))
    scores = product("rcqd,rckd->rcqk", grouped, key)
    if key_scales is not None:
      scores *= gather(key_scales, table)[:, :, None]
    scores = jnp.where(seen, scores * scale, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = top if sums is None else jnp.maximum(sums.top, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if value_scales is not None:
      weights *= jnp.where(live[:, None], gather(value_scales, table), 0.0)[:, :, None]
    out = product("rcqk,rckv->rcqv", weights.astype(query.dtype), value)
    if sums is None:
      return _Sums(top, total, out)
    shrink = jnp.exp(sums.top - top)
    return _Sums(top, sums.total * shrink + total, sums.out * shrink + out)

  if tiles == 1:
    sums = join(0, None)
  else:
    dtype, lead = jnp.result_type(jnp.float32, query), grouped.shape[:3]
    sums = _Sums(
      jnp.full((*lead, 1), MASKED, dtype),
      jnp.zeros((*lead, 1), dtype),
      jnp.zeros((*lead, value_dim), dtype),
    )
    first = jnp.min(jnp.where(counts > 0, begins, tiles * tile)) // tile
    sums = jax.lax.fori_loop(first, -(-jnp.max(ends) // tile), join, sums)
  # A loop of no tiles leaves a sum of 0.
  out = sums.out / jnp.where(sums.total > 0, sums.total, 1.0)
  return jnp.moveaxis(out.reshape(rows, heads, time, value_dim), 2, 1)


def gather(pool: Array, table: Array) -> Array:
  """[R, C, N S, ...] of a pool [P, C, S, ...] by pages [R, N]; other places are clipped."""
  kept = (1, *range(3, pool.ndim + 1))
  numbers = jax.lax.GatherDimensionNumbers(
    offset_dims=kept, collapsed_slice_dims=(0,), start_index_map=(0,)
  )
  sizes = (1, *pool.shape[1:])
  mode = jax.lax.GatherScatterMode.CLIP
  out = jax.lax.gather(pool, table[..., None], numbers, slice_sizes=sizes, mode=mode)
  return out.reshape(*out.shape[:2], -1, *pool.shape[3:])


def product(equation: str, left: Array, right: Array) -> Array:
  """Summed in float32 or wider; float32 factors keep their precision, narrow ones are exact."""
  if right.dtype.itemsize == 1:
    right = right.astype(left.dtype)
  wide = left.dtype != jnp.bfloat16
  return jnp.einsum(
    equation,
    left,
    right,
    precision=jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.result_type(jnp.float32, left),
  )
