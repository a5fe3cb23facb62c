"""Softmax attention in square tiles, with bounded program size and memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.linear import precision

Array = jax.Array

# Finite: a row with nothing to see stays finite, and exp gives exactly 0 for what is masked.
MASKED = -1e30


class _Grid(NamedTuple):
  """Places of the tiles; the same on both sides of the diagonal. Static except ``start``."""

  start: Array  # int32 [], place of the first query among the keys
  block: int
  window: int | None
  queries: int  # tiles
  keys: int

  def keys_of(self, i: Array) -> tuple[Array, Array]:
    """First and one past the last tile of keys that query tile i sees."""
    first = self.start + i * self.block
    stop = jnp.minimum((first + self.block - 1) // self.block + 1, self.keys)
    if self.window is None:
      return jnp.zeros_like(stop), stop
    return jnp.maximum(first - self.window + 1, 0) // self.block, stop

  def queries_of(self, j: Array) -> tuple[Array, Array]:
    """First and one past the last tile of queries that see key tile j."""
    first = jnp.maximum((j * self.block - self.start) // self.block, 0)
    if self.window is None:
      return first, jnp.full_like(first, self.queries)
    last = (j + 1) * self.block - 1 + self.window - 1 - self.start
    return first, jnp.minimum(last // self.block + 1, self.queries)

  def seen(self, i: Array, j: Array, query_segments: Array, key_segments: Array) -> Array:
    """bool [B, block, block]: whether the queries of tile i see the keys of tile j."""
    at = (self.start + i * self.block + jnp.arange(self.block))[:, None]
    to = j * self.block + jnp.arange(self.block)
    seen = query_segments[i][:, :, None] == key_segments[j][:, None, :]
    seen &= at >= to
    if self.window is not None:
      seen &= at - to < self.window
    return seen


def attend_tiles(
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch all_time kv_heads width"],
  value: Float[Array, "batch all_time kv_heads value_width"],
  query_segments: Int[Array, "batch time"],
  key_segments: Int[Array, "batch all_time"],
  start: Int[Array, ""],
  *,
  scale: float,
  block: int,
  window: int | None,
) -> Float[Array, "batch time heads value_width"]:
  """``softmax(scale q kᵀ) v``, causal and within a segment, with [block, block] weights at once.

  Query tiles run one after the other over the key tiles they see, with a running maximum and sum;
  the backward pass recomputes the weights, and runs over key tiles.

  Args:
    query, key, value, scale, window: see ``attend``.
    query_segments, key_segments: ids, 0 or more; a query sees keys with the same id.
    start: place of the first query among the keys.
    block: tokens of a tile.

  References: Dao, 2307.08691.
  """
  time, heads = query.shape[1:3]
  grid, queries, keys, values, ids = _cut(
    query, key, value, query_segments, key_segments, start, block, window
  )
  out = _attend(queries, keys, values, *ids, grid.start, scale, block, window)
  # [tiles, B, kv_heads, shared, block, V] to [B, tiles, block, kv_heads, shared, V].
  out = out.reshape(*out.shape[:3], -1, block, out.shape[-1]).transpose(1, 0, 4, 2, 3, 5)
  return out.reshape(out.shape[0], -1, heads, out.shape[-1])[:, :time]


def max_tiles(
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch all_time kv_heads width"],
  query_segments: Int[Array, "batch time"],
  key_segments: Int[Array, "batch all_time"],
  start: Int[Array, ""],
  *,
  scale: float,
  block: int,
  window: int | None,
) -> Float[Array, " heads"]:
  """Largest ``scale q kᵀ`` of each head over pairs that ``attend_tiles`` weighs, but padding."""
  heads = query.shape[2]
  grid, queries, keys, _, ids = _cut(
    query, key, key, query_segments, key_segments, start, block, window
  )
  # Padding sees nothing at all: its ids differ on the two sides.
  query_ids = jnp.where(ids[0] == 0, -2, ids[0])

  def tile(i: Array) -> Array:
    def step(j: Array, top: Array) -> Array:
      scores = _scores(queries[i], keys[j], grid.seen(i, j, query_ids, ids[1]), scale)
      return jnp.maximum(top, jnp.max(scores, axis=-1))

    top = jax.lax.fori_loop(*grid.keys_of(i), step, jnp.full(queries.shape[1:4], MASKED))
    return jnp.max(top.reshape(-1, heads, block), axis=(0, 2))

  return jnp.max(jax.lax.map(tile, jnp.arange(grid.queries)), axis=0)


def _cut(
  query: Array,
  key: Array,
  value: Array,
  query_segments: Array,
  key_segments: Array,
  start: Array,
  block: int,
  window: int | None,
) -> tuple[_Grid, Array, Array, Array, tuple[Array, Array]]:
  """Tiles on a leading axis; time is padded with segment -1.

  Returns:
    The grid; queries [tiles, B, kv_heads, shared * block, D], keys and values
    [tiles, B, kv_heads, block, D or V], the two segment ids [tiles, B, block].
  """
  kv_heads = key.shape[2]

  def tiles(x: Array, fill: int = 0) -> Array:
    pad = -x.shape[1] % block
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

  queries = tiles(query)
  queries = queries.reshape(*queries.shape[:3], kv_heads, -1, query.shape[-1])
  queries = queries.transpose(0, 1, 3, 4, 2, 5)
  queries = queries.reshape(*queries.shape[:3], -1, query.shape[-1])
  keys, values = (jnp.swapaxes(tiles(v), 2, 3) for v in (key, value))
  ids = tiles(query_segments, -1), tiles(key_segments, -1)
  start = jnp.asarray(start, jnp.int32)
  return _Grid(start, block, window, len(queries), len(keys)), queries, keys, values, ids


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attend(
  queries: Array,
  keys: Array,
  values: Array,
  query_ids: Array,
  key_ids: Array,
  start: Array,
  scale: float,
  block: int,
  window: int | None,
) -> Array:
  return _attend_forward(queries, keys, values, query_ids, key_ids, start, scale, block, window)[0]


def _attend_forward(
  queries: Array,
  keys: Array,
  values: Array,
  query_ids: Array,
  key_ids: Array,
  start: Array,
  scale: float,
  block: int,
  window: int | None,
) -> tuple[Array, tuple[Array, ...]]:
  grid = _Grid(start, block, window, len(queries), len(keys))
  lead = queries.shape[1:4]

  def tile(i: Array) -> tuple[Array, Array]:
    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
      out, top, total = carry
      scores = _scores(queries[i], keys[j], grid.seen(i, j, query_ids, key_ids), scale)
      higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
      # Sums from before the first visible key are erased by the first real score.
      weights, kept = jnp.exp(scores - higher), jnp.exp(top - higher)
      more = _product("bcqk,bckv->bcqv", weights.astype(values.dtype), values[j])
      total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
      return out * kept + more, higher, total

    carry = (
      jnp.zeros((*lead, values.shape[-1]), jnp.float32),
      jnp.full((*lead, 1), MASKED, jnp.float32),
      jnp.zeros((*lead, 1), jnp.float32),
    )
    out, top, total = jax.lax.fori_loop(*grid.keys_of(i), step, carry)
    return (out / total).astype(queries.dtype), top + jnp.log(total)

  out, log_total = jax.lax.map(tile, jnp.arange(grid.queries))
  return out, (queries, keys, values, query_ids, key_ids, start, out, log_total)


def _attend_backward(
  scale: float, block: int, window: int | None, kept: tuple[Array, ...], gradient: Array
) -> tuple[Array | None, ...]:
  queries, keys, values, query_ids, key_ids, start, out, log_total = kept
  grid = _Grid(start, block, window, len(queries), len(keys))
  dtype = queries.dtype
  delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)

  def tile(to_queries: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
      to_queries, to_key, to_value = carry
      scores = _scores(queries[i], keys[j], grid.seen(i, j, query_ids, key_ids), scale)
      weights = jnp.exp(scores - log_total[i])
      slope = _product("bcqv,bckv->bcqk", gradient[i], values[j])
      slope = (weights * (slope - delta[i]) * scale).astype(dtype)
      to_queries = to_queries.at[i].add(_product("bcqk,bckd->bcqd", slope, keys[j]))
      to_key += _product("bcqk,bcqd->bckd", slope, queries[i])
      to_value += _product("bcqk,bcqv->bckv", weights.astype(dtype), gradient[i])
      return to_queries, to_key, to_value

    nothing = (jnp.zeros(v.shape[1:], jnp.float32) for v in (keys, values))
    to_queries, *to_tile = jax.lax.fori_loop(*grid.queries_of(j), step, (to_queries, *nothing))
    return to_queries, tuple(v.astype(dtype) for v in to_tile)

  to_queries, (to_keys, to_values) = jax.lax.scan(
    tile, jnp.zeros(queries.shape, jnp.float32), jnp.arange(grid.keys)
  )
  return to_queries.astype(dtype), to_keys, to_values, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(queries: Array, keys: Array, seen: Array, scale: float) -> Array:
  """Masked float32 scores [B, kv_heads, shared * block, block]."""
  mask = jnp.tile(seen, (1, queries.shape[2] // seen.shape[1], 1))[:, None]
  return jnp.where(mask, _product("bcqd,bckd->bcqk", queries, keys) * scale, MASKED)


def _product(equation: str, left: Array, right: Array) -> Array:
  return jnp.einsum(
    equation, left, right, precision=precision(left.dtype), preferred_element_type=jnp.float32
  )
