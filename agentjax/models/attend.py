"""Softmax attention itself: over packed rows in training, over the caches of slots in decoding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.products import precision

Array = jax.Array

# Finite: a row with nothing to see stays finite, and exp gives exactly 0 for what is masked.
_MASKED = -1e30


def attend(
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch time kv_heads width"],
  value: Float[Array, "batch time kv_heads value_width"],
  *,
  segment_ids: Int[Array, "batch time"],
  scale: float,
  block: int,
  window: int | None = None,
) -> Float[Array, "batch time heads value_width"]:
  """``softmax(scale q kᵀ) v``, causal and within a segment, for training.

  Runs over blocks of queries, each against the keys up to its own end: half the work of one square
  product. The weights of one block [batch, heads, block, time] are held at once, and are recomputed
  in the backward pass.

  Args:
    query: head h reads key head ``h // (heads / kv_heads)``.
    key, value: of the same tokens.
    segment_ids: tokens of different segments never see each other.
    scale: on the products.
    block: queries of one product; later keys are left out of it.
    window: how many tokens back, itself included, a token sees; None is all of them.
  """
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


def attend_cache(
  query: Float[Array, "rows time heads width"],
  keys: Float[Array, "rows kv_heads length width"],
  values: Float[Array, "rows kv_heads length value_width"],
  *,
  positions: Int[Array, "rows time"],
  scale: float,
  window: int | None = None,
) -> Float[Array, "rows time heads value_width"]:
  """The same over what slots hold, their own tokens included.

  Args:
    keys, values: entry p of a row belongs to the token at position p.
    positions: place of each query in its slot; it sees entries up to there.
    scale, window: see ``attend``.
  """
  place = jnp.arange(keys.shape[2])
  seen = place <= positions[..., None]
  if window is not None:
    seen &= place > positions[..., None] - window
  return jnp.moveaxis(_attend(jnp.moveaxis(query, 1, 2), keys, values, seen, scale), 2, 1)


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
  return jnp.where(mask, scores * scale, _MASKED)
