"""Softmax attention itself: over packed rows in training, over the caches of slots in decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models import flash, paged, splash
from agentjax.models.chunks import map_time
from agentjax.models.linear import precision
from agentjax.models.pages import Held, Paged, read_places
from agentjax.models.tiles import MASKED, attend_tiles, max_tiles
from agentjax.sharding import index, largest, on_shards, ways, whole
from pallas_kernels.kv_packet import Rotary

Array = jax.Array

# Blocks of queries that are written out one by one; ours.
_UNROLLED = 16
# Places of a cache that are read at once; ours.
CACHE_BLOCK = 256


class Sight(NamedTuple):
  """Which tokens of its segment each token sees, in the place of itself and those before it.

  A token sees those whose rank is not above its own, if they lie on lane 0 or on its own lane.
  """

  ranks: Array  # int32 [B, T]
  lanes: Array  # int32 [B, T]


def attend(
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch time kv_heads width"],
  value: Float[Array, "batch time kv_heads value_width"],
  *,
  segment_ids: Int[Array, "batch time"],
  scale: float,
  block: int,
  window: int | None = None,
  kernels: str | None = None,
  sight: Sight | None = None,
) -> Float[Array, "batch time heads value_width"]:
  """``softmax(scale q kᵀ) v``, causal and within a segment, for training.

  Weights are recomputed in the backward pass. On a TPU in bfloat16 it is JAX's splash kernel, for
  rows of a multiple of 128 tokens; on a GPU with ``kernels="pallas_gpu"`` JAX's flash kernel, where
  ``flash.fits``. Otherwise, up to 16 blocks of queries run in one straight line,
  each against the keys up to its own end, and more run in a loop over [block, block] tiles.

  Where time is split over the mesh, every device gathers the keys and values of whole rows, which
  with few key heads are small, and attends with its own queries.

  Args:
    query: head h reads key head ``h // (heads / kv_heads)``.
    key, value: of the same tokens.
    segment_ids: tokens of different segments never see each other.
    scale: on the products.
    block: queries of one product; later keys are left out of it.
    window: how many tokens back, itself included, a token sees; None is all of them.
    kernels: ``ModelConfig.kernels``.
    sight: what a token sees, with ``window`` None; every block then weighs all keys, by XLA alone.
  """
  on_gpu = kernels == "pallas_gpu" and flash.fits(query, key, value, window)
  part = functools.partial(_attend_part, scale=scale, block=block, window=window, on_gpu=on_gpu)
  arguments: list[tuple[Any, Any]] = [
    (query, ("batch", "time", "heads", None)),
    (key, ("batch", "time", "kv_heads", None)),
    (value, ("batch", "time", "kv_heads", None)),
    (segment_ids, ("batch", "time")),
  ]
  if sight is not None:
    part = functools.partial(_attend_in_sight, scale=scale, block=block)
    arguments += [(v, ("batch", "time")) for v in sight]
  elif splash.fits(query, key, value):
    heads = query.shape[2] // ways("heads")
    made = splash.kernel(query.shape[1], heads, ways("time"), window)
    arguments.append((made, functools.partial(splash.kernel_spec, made)))
  return on_shards(part, arguments, ("batch", "time", "heads", None), name="attention")


def max_scores(
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch time kv_heads width"],
  *,
  segment_ids: Int[Array, "batch time"],
  scale: float,
  block: int,
  window: int | None = None,
) -> Float[Array, " heads"]:
  """Float32, the largest ``scale q kᵀ`` of each head over the pairs ``attend`` weighs, but padding.

  The statistic of QK-clip; no gradient flows through it. Arguments as of ``attend``.

  References: Kimi K2, 2507.20534, section 2.1.
  """
  arguments = [
    (jax.lax.stop_gradient(query), ("batch", "time", "heads", None)),
    (jax.lax.stop_gradient(key), ("batch", "time", "kv_heads", None)),
    (segment_ids, ("batch", "time")),
  ]

  def part(query: Array, key: Array, segment_ids: Array) -> Array:
    top = max_tiles(
      query,
      whole(key),
      segment_ids,
      whole(segment_ids),
      index("time") * query.shape[1],
      scale=scale,
      block=min(block, query.shape[1]),
      window=window,
    )
    return largest(top, ("batch", "time"))

  return on_shards(part, arguments, ("heads",), name="max_scores")


def attend_cache(
  query: Float[Array, "rows time heads width"],
  keys: Held,
  values: Held | None,
  *,
  positions: Int[Array, "rows time"],
  scale: float,
  window: int | None = None,
  rows: Int[Array, " rows"] | None = None,
  counts: Int[Array, " rows"] | Bool[Array, " rows"] | None = None,
  value_width: int | None = None,
  rotary: Rotary | None = None,
  kernels: str | None = None,
) -> Float[Array, "rows time heads value_width"]:
  """The same over what slots hold, their own tokens included.

  A long cache is read block by block, as far as the furthest position, so that the cost is that of
  what is held and not of the room there is. What a row does not see adds an exact zero: a result
  depends neither on other rows nor on how far the loop goes.

  With ``kernels`` "pallas_tpu" or "pallas_gpu" a kernel reads pages on that platform, where
  ``paged.fits``: each row as far as it goes itself. On other platforms nothing changes.

  Args:
    keys: [slots, kv_heads, length, width]; entry p of a slot belongs to the token at position p.
    values: [slots, kv_heads, length, value_width]; None where they are the first ``value_width``
      channels of the keys.
    positions: place of each query in its slot; it sees entries up to there. Those of a row rise by
      one; only its first tokens may lie past the end instead, and mean nothing.
    scale, window: see ``attend``.
    rows: slot of each row; None where row r is slot r. One that is no slot means nothing.
    counts: tokens of each row that are not right padding; padding costs a kernel nothing. None is
      all of them.
    value_width: where ``values`` is None.
    rotary: how the keys are turned, None where not at all; needed where slots hold ``pages.Pieces``
      only, which were made for other positions.
    kernels: ``ModelConfig.kernels``.
  """

  def plain() -> Array:
    own = keys if values is None else values
    out = _attend_held(query, keys, own, positions, rows, scale=scale, window=window)
    # The rest is weighed for nothing: to cut it off first would copy the whole cache.
    return out[..., :value_width] if values is None else out

  def kernel(implementation: str | None = kernels) -> Array:
    return paged.attend_paged(
      query,
      keys,
      values,
      positions=positions,
      scale=scale,
      window=window,
      rows=rows,
      counts=counts,
      value_width=value_width,
      rotary=rotary,
      implementation=implementation,
    )

  if isinstance(keys, Paged) and keys.pieces is not None:
    return kernel(None)
  if kernels is None or not paged.fits(kernels, query, keys, values, rows, value_width):
    return plain()
  fast = dict.fromkeys(paged.platforms(kernels), kernel)
  return jax.lax.platform_dependent(**fast, default=plain)


def _attend_held(
  query: Array,
  keys: Held,
  values: Held,
  positions: Array,
  rows: Array | None,
  *,
  scale: float,
  window: int | None,
) -> Array:
  """``attend_cache`` in XLA, block by block."""
  attend = _attend_whole if keys.shape[2] <= CACHE_BLOCK else _attend_blocks
  return attend(query, keys, values, positions, rows, scale, window)


def _attend_whole(
  query: Array,
  keys: Held,
  values: Held,
  positions: Array,
  rows: Array | None,
  scale: float,
  window: int | None,
) -> Array:
  length = keys.shape[2]
  key, value = (read_places(held, rows, 0, length) for held in (keys, values))
  seen = _seen(positions, jnp.arange(length), window)
  return jnp.moveaxis(_attend(jnp.moveaxis(query, 1, 2), key, value, seen, scale), 2, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend_blocks(
  query: Array,
  keys: Held,
  values: Held,
  positions: Array,
  rows: Array | None,
  scale: float,
  window: int | None,
) -> Array:
  """The gradient is that of ``_attend_whole``: a loop of so many steps as it needs has none."""
  query = jnp.moveaxis(query, 1, 2)
  length, block = keys.shape[2], CACHE_BLOCK

  def held(cache: Held, start: Array | int) -> Array:
    return read_places(cache, rows, start, block)

  def seen(start: Array, first: Array) -> Array:
    place = start + jnp.arange(block)
    return _seen(positions, place, window) & (place >= first)

  def step(i: Array, sums: _Sums) -> _Sums:
    first = i * block
    start = jnp.minimum(first, length - block)  # the last one overlaps the one before
    return _joined(sums, query, held(keys, start), held(values, start), seen(start, first), scale)

  sums = _no_sums((*query.shape[:3], values.shape[-1]), keys.shape[1])
  sums = jax.lax.fori_loop(0, jnp.max(positions) // block + 1, step, sums)
  return _output(sums, query)


def _attend_blocks_forward(*arguments: Any) -> tuple[Array, tuple[Any, ...]]:
  return _attend_blocks(*arguments), arguments[:5]


def _attend_blocks_backward(
  scale: float, window: int | None, kept: tuple[Any, ...], gradient: Array
) -> tuple[Any, ...]:
  query, keys, values, positions, rows = kept

  def whole(query: Array, keys: Held, values: Held) -> Array:
    return _attend_whole(query, keys, values, positions, rows, scale, window)

  return *jax.vjp(whole, query, keys, values)[1](gradient), None, None


_attend_blocks.defvjp(_attend_blocks_forward, _attend_blocks_backward)


def _seen(positions: Array, place: Array, window: int | None) -> Array:
  """Which places each query sees."""
  visible = place <= positions[..., None]
  return visible if window is None else visible & (place > positions[..., None] - window)


def attend_chunk(
  query: Float[Array, "1 time heads width"],
  key: Float[Array, "1 time kv_heads width"],
  value: Float[Array, "1 time kv_heads value_width"],
  held: Callable[[Array], tuple[Array, Array]],
  *,
  start: Int[Array, ""],
  scale: float,
  block: int,
) -> Float[Array, "1 time heads value_width"]:
  """Tokens that follow ``start`` others attend to themselves and to these, block by block.

  Running maxima and sums, the tokens' own keys first, so that a result does not depend on the
  length of the cache; an entry that is not seen adds an exact zero, ``exp(MASKED - top)``.

  Args:
    query, key, value: of the tokens.
    held: first place of a block to its keys [1, kv_heads, block, width] and values.
    start: tokens before these.
    scale: on the products.
    block: keys of one product.
  """
  query, key, value = (jnp.moveaxis(v, 1, 2) for v in (query, key, value))
  time = query.shape[2]

  def earlier(step: Array, sums: _Sums) -> _Sums:
    seen = step * block + jnp.arange(block) < start
    seen = jnp.broadcast_to(seen, (1, time, block))
    return _joined(sums, query, *held(step * block), seen, scale)

  sums = _no_sums((*query.shape[:3], value.shape[-1]), key.shape[1])
  sums = _joined(sums, query, key, value, jnp.tril(jnp.ones((1, time, time), bool)), scale)
  return _output(jax.lax.fori_loop(0, -(-start // block), earlier, sums), query)


class _Sums(NamedTuple):
  """A softmax over part of the keys, [rows, kv_heads, queries, ...] in float32."""

  top: Array  # largest score
  total: Array  # sum of exp(score - top)
  out: Array  # sum of exp(score - top) * value


def _no_sums(shape: tuple[int, ...], kv_heads: int) -> _Sums:
  """Over no keys at all, for queries and values of [rows, heads, time, value_width]."""
  rows, heads, time, width = shape
  lead = (rows, kv_heads, heads // kv_heads * time)
  return _Sums(
    jnp.full((*lead, 1), MASKED, jnp.float32),
    jnp.zeros((*lead, 1), jnp.float32),
    jnp.zeros((*lead, width), jnp.float32),
  )


def _joined(
  sums: _Sums, query: Array, key: Array, value: Array, seen: Array, scale: float
) -> _Sums:
  """With further keys. The first ones must hold one that is seen."""
  scores = _scores(query, key, seen, scale)
  top = jnp.maximum(sums.top, jnp.max(scores, axis=-1, keepdims=True))
  weights, shrink = jnp.exp(scores - top), jnp.exp(sums.top - top)
  more = jnp.matmul(
    weights.astype(value.dtype),
    value,
    precision=precision(value.dtype),
    preferred_element_type=jnp.float32,
  )
  total = sums.total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
  return _Sums(top, total, sums.out * shrink + more)


def _output(sums: _Sums, query: Array) -> Array:
  """[rows, time, heads, value_width] in the dtype of the queries [rows, heads, time, width]."""
  out = (sums.out / sums.total).astype(query.dtype)
  return jnp.moveaxis(out.reshape(*query.shape[:3], out.shape[-1]), 2, 1)


def _attend_part(
  query: Array,
  key: Array,
  value: Array,
  segment_ids: Array,
  made: Any = None,
  *,
  scale: float,
  block: int,
  window: int | None,
  on_gpu: bool,
) -> Array:
  """``attend`` of one device's queries; ``made`` is its part of the TPU kernel, if it fits."""
  time = query.shape[1]
  start = index("time") * time
  keys = whole(key), whole(value), whole(segment_ids)

  def plain(query: Array, key: Array, value: Array, ids: Array, all_ids: Array) -> Array:
    if ways("time") == 1 and time <= _UNROLLED * block:
      return _attend_unrolled(query, key, value, ids, scale, block, window)
    return attend_tiles(
      query, key, value, ids, all_ids, start, scale=scale, block=min(block, time), window=window
    )

  arguments = (query, *keys[:2], segment_ids, keys[2])
  fast: dict[str, Callable[..., Array]] = {}
  if made is not None:
    fast["tpu"] = functools.partial(splash.attend_splash, made, scale=scale)
  if on_gpu:
    fast["cuda"] = functools.partial(flash.attend_flash, scale=scale)
  return (
    jax.lax.platform_dependent(*arguments, **fast, default=plain) if fast else plain(*arguments)
  )


def _attend_in_sight(
  query: Array, key: Array, value: Array, *rows: Array, scale: float, block: int
) -> Array:
  """``attend`` of one device's queries to what they see; ``rows`` are segments, ranks, lanes."""
  key, value = (jnp.moveaxis(whole(v), 1, 2) for v in (key, value))
  segments, below, beside = (whole(v)[:, None] for v in rows)

  def some(given: tuple[Array, ...]) -> Array:
    query, segment, rank, lane = given
    seen = (segment[..., None] == segments) & (rank[..., None] >= below)
    seen &= (beside == 0) | (beside == lane[..., None])
    return jnp.moveaxis(_attend(jnp.moveaxis(query, 1, 2), key, value, seen, scale), 1, 2)

  return map_time(some, (query, *rows), min(block, query.shape[1]))


def _attend_unrolled(
  query: Array,
  key: Array,
  value: Array,
  segment_ids: Array,
  scale: float,
  block: int,
  window: int | None,
) -> Array:
  """Blocks of queries in a straight line, each with one product over the keys up to its end."""
  query, key, value = (jnp.moveaxis(v, 1, 2) for v in (query, key, value))
  time = query.shape[2]
  parts = []
  for start in range(0, time, block):
    end = min(start + block, time)
    first = 0 if window is None else max(0, start + 1 - window)
    at, to = jnp.arange(start, end)[:, None], jnp.arange(first, end)
    seen = segment_ids[:, start:end, None] == segment_ids[:, None, first:end]
    seen &= at >= to
    if window is not None:
      seen &= at - to < window
    parts.append(
      _attend(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], seen, scale)
    )
  return jnp.moveaxis(jnp.concatenate(parts, axis=2), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, seen: Array, scale: float) -> Array:
  """Softmax attention without keeping the weights for the gradient.

  Args:
    query: [B, heads, Q, D].
    key: [B, kv_heads, K, D].
    value: [B, kv_heads, K, V].
    seen: bool [B, Q, K].
    scale: on the products.

  Returns:
    [B, heads, Q, V].
  """
  return _attend_forward(query, key, value, seen, scale)[0]


def _attend_forward(
  query: Array, key: Array, value: Array, seen: Array, scale: float
) -> tuple[Array, tuple[Array, ...]]:
  scores = _scores(query, key, seen, scale)
  top = jnp.max(scores, axis=-1, keepdims=True)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  exact = precision(value.dtype)
  out = jnp.matmul(
    weights.astype(value.dtype), value, precision=exact, preferred_element_type=jnp.float32
  )
  out = (out / total).astype(query.dtype).reshape(*query.shape[:3], value.shape[-1])
  return out, (query, key, value, seen, out, top + jnp.log(total))


def _attend_backward(
  scale: float, kept: tuple[Array, ...], gradient: Array
) -> tuple[Array | None, ...]:
  query, key, value, seen, out, log_total = kept
  dtype, exact = query.dtype, precision(query.dtype)
  product = functools.partial(jnp.einsum, precision=exact)
  weights = jnp.exp(_scores(query, key, seen, scale) - log_total)
  delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  delta = _group(delta, key)
  gradient = _group(gradient, key)
  slope = product("bcqd,bckd->bcqk", gradient, value, preferred_element_type=jnp.float32)
  slope = (weights * (slope - delta) * scale).astype(dtype)
  # The small operand first: XLA:CPU transposes the left one.
  return (
    jnp.matmul(slope, key, precision=exact).reshape(query.shape),
    jnp.swapaxes(product("bcqd,bcqk->bcdk", _group(query, key), slope), 2, 3),
    jnp.swapaxes(product("bcqd,bcqk->bcdk", gradient, weights.astype(dtype)), 2, 3),
    None,
  )


_attend.defvjp(_attend_forward, _attend_backward)


def _group(x: Array, key: Array) -> Array:
  """[B, heads, Q, D] to [B, kv_heads, heads / kv_heads * Q, D]."""
  return x.reshape(*key.shape[:2], -1, x.shape[-1])


def _scores(query: Array, key: Array, seen: Array, scale: float) -> Array:
  """Masked float32 scores [B, kv_heads, heads / kv_heads * Q, K]."""
  grouped = _group(query, key)
  scores = jnp.einsum(
    "bcqd,bckd->bcqk",
    grouped,
    key,
    precision=precision(query.dtype),
    preferred_element_type=jnp.float32,
  )
  shared = scores.shape[2] // seen.shape[1]
  mask = jnp.tile(seen, (1, shared, 1))[:, None]
  return jnp.where(mask, scores * scale, MASKED)
