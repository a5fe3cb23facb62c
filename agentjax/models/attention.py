"""Grouped-query attention over packed rows, and over the keys and values of slots."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.products import linear, precision
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array

# Finite: a row with nothing to see stays finite, and exp gives exactly 0 for what is masked.
_MASKED = -1e30


@flax.struct.dataclass
class Attention:
  """Projections; the norms are None without ``qk_norm``."""

  query: Weight  # [embed, heads, head_dim]
  key: Weight  # [embed, kv_heads, head_dim]
  value: Weight  # [embed, kv_heads, head_dim]
  out: Weight  # [heads, head_dim, embed]
  query_norm: Weight | None  # [head_dim]
  key_norm: Weight | None  # [head_dim]


@flax.struct.dataclass
class KVCache:
  """Keys (rotated, where there is a rotary embedding) and values of every slot."""

  keys: Array  # [slots, kv_heads, length, head_dim]
  values: Array  # [slots, kv_heads, length, head_dim]


def attention_spec(config: ModelConfig) -> Attention:
  """Abstract parameters of one attention block."""
  into = config.init_scale * config.d_model**-0.5

  def projection(heads: int, name: str) -> ParamSpec:
    return ParamSpec(
      (config.d_model, heads, config.head_dim),
      ("embed", name, "head_dim"),
      config.param_dtype,
      scale=into,
    )

  width = config.num_heads * config.head_dim
  norm = norm_spec(config.head_dim, config) if config.qk_norm else None
  return Attention(
    query=projection(config.num_heads, "heads"),
    key=projection(config.num_kv_heads, "kv_heads"),
    value=projection(config.num_kv_heads, "kv_heads"),
    out=ParamSpec(
      (config.num_heads, config.head_dim, config.d_model),
      ("heads", "head_dim", "embed"),
      config.param_dtype,
      scale=config.init_scale * config.residual_scale * width**-0.5,
    ),
    query_norm=norm,
    key_norm=norm,
  )


def init_kv_cache(config: ModelConfig, slots: int, length: int) -> KVCache:
  """Zeros, in the compute dtype."""
  shape = (slots, config.num_kv_heads, length, config.head_dim)
  return KVCache(keys=jnp.zeros(shape, config.dtype), values=jnp.zeros(shape, config.dtype))


def attention(
  params: Attention,
  x: Float[Array, "batch time embed"],
  config: ModelConfig,
  *,
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
) -> Float[Array, "batch time embed"]:
  """``softmax(q kᵀ / sqrt(head_dim)) v``, causal and within a segment.

  Runs over blocks of queries, each against the keys up to its own end: half the work of one square
  product. The weights of one block [batch, heads, block, time] are held at once, and are recomputed
  in the backward pass.
  """
  query, key, value = _project(params, x, config, positions)
  query, key, value = (jnp.moveaxis(v, 1, 2) for v in (query, key, value))
  time = x.shape[1]
  parts = []
  for start in range(0, time, config.attention_block):
    end = min(start + config.attention_block, time)
    seen = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
    seen &= jnp.arange(start, end)[:, None] >= jnp.arange(end)
    parts.append(_attend(query[:, :, start:end], key[:, :, :end], value[:, :, :end], seen))
  return _output(params, jnp.concatenate(parts, axis=2))


def attention_extend(
  params: Attention,
  x: Float[Array, "rows time embed"],
  cache: KVCache,
  config: ModelConfig,
  *,
  rows: Int[Array, " rows"],
  positions: Int[Array, "rows time"],
  counts: Int[Array, " rows"],
) -> tuple[Float[Array, "rows time embed"], KVCache]:
  """Appends ``counts[r]`` tokens to slot ``rows[r]`` and attends over all the slot holds.

  Args:
    rows: slot of each row; the number of slots for a row that is not used.
    positions: place of each token in its slot.
    counts: tokens of each row that are not right padding.
  """
  query, key, value = _project(params, x, config, positions)
  length = cache.keys.shape[2]
  real = jnp.arange(x.shape[1]) < counts[:, None]
  place = jnp.where(real, positions, length)
  cache = KVCache(
    keys=cache.keys.at[rows[:, None], :, place].set(key, mode="drop"),
    values=cache.values.at[rows[:, None], :, place].set(value, mode="drop"),
  )
  seen = jnp.arange(length) <= positions[..., None]
  keys = cache.keys.at[rows].get(mode="clip")
  values = cache.values.at[rows].get(mode="clip")
  return _output(params, _attend(jnp.moveaxis(query, 1, 2), keys, values, seen)), cache


def attention_step(
  params: Attention,
  x: Float[Array, "slots embed"],
  cache: KVCache,
  config: ModelConfig,
  *,
  lengths: Int[Array, " slots"],
  active: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots embed"], KVCache]:
  """One token for every active slot, written at ``lengths``."""
  query, key, value = _project(params, x[:, None], config, lengths[:, None])
  length = cache.keys.shape[2]
  slots = jnp.arange(x.shape[0])
  place = jnp.where(active, lengths, length)
  cache = KVCache(
    keys=cache.keys.at[slots, :, place].set(key[:, 0], mode="drop"),
    values=cache.values.at[slots, :, place].set(value[:, 0], mode="drop"),
  )
  seen = jnp.arange(length) <= lengths[:, None, None]
  out = _attend(jnp.moveaxis(query, 1, 2), cache.keys, cache.values, seen)
  return _output(params, out)[:, 0], cache


def _project(
  params: Attention, x: Array, config: ModelConfig, positions: Array
) -> tuple[Array, Array, Array]:
  """Query [B, T, heads, head_dim], key and value [B, T, kv_heads, head_dim]."""
  query, key, value = (
    linear(x, w).reshape(*x.shape[:2], *w.shape[1:])
    for w in (params.query, params.key, params.value)
  )
  if params.query_norm is not None and params.key_norm is not None:
    query = rms_norm(query, params.query_norm, config.norm_eps)
    key = rms_norm(key, params.key_norm, config.norm_eps)
  if config.rope_theta is not None:
    query = _rotate(query, positions, config.rope_theta)
    key = _rotate(key, positions, config.rope_theta)
  return query, key, value


def _rotate(x: Array, positions: Array, theta: float) -> Array:
  """Turns the pair (x_i, x_{i+n/2}) of each head by ``position * theta^(-2i/n)``, in float32."""
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


@jax.custom_vjp
def _attend(query: Array, key: Array, value: Array, seen: Array) -> Array:
  """Softmax attention without keeping the weights for the gradient.

  Args:
    query: [B, heads, Q, D].
    key, value: [B, kv_heads, K, D]; query head h reads key head ``h // (heads / kv_heads)``.
    seen: bool [B, Q, K].

  Returns:
    [B, heads, Q, D].
  """
  return _attend_forward(query, key, value, seen)[0]


def _attend_forward(
  query: Array, key: Array, value: Array, seen: Array
) -> tuple[Array, tuple[Array, ...]]:
  scores = _scores(query, key, seen)
  top = jnp.max(scores, axis=-1, keepdims=True)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  exact = precision(value.dtype)
  out = jnp.matmul(
    weights.astype(value.dtype), value, precision=exact, preferred_element_type=jnp.float32
  )
  out = (out / total).astype(query.dtype).reshape(query.shape)
  return out, (query, key, value, seen, out, top + jnp.log(total))


def _attend_backward(kept: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
  query, key, value, seen, out, log_total = kept
  dtype, exact = query.dtype, precision(query.dtype)
  product = functools.partial(jnp.einsum, precision=exact)
  weights = jnp.exp(_scores(query, key, seen) - log_total)
  delta = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  delta = _group(delta, key)
  gradient = _group(gradient, key)
  slope = product("bcqd,bckd->bcqk", gradient, value, preferred_element_type=jnp.float32)
  slope = (weights * (slope - delta) * query.shape[-1] ** -0.5).astype(dtype)
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


def _scores(query: Array, key: Array, seen: Array) -> Array:
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
  return jnp.where(mask, scores * query.shape[-1] ** -0.5, _MASKED)


def _output(params: Attention, heads: Array) -> Array:
  """[B, heads, T, head_dim] to [B, T, embed]."""
  merged = jnp.moveaxis(heads, 1, 2)
  merged = merged.reshape(*merged.shape[:2], -1)
  return linear(merged, params.out.reshape(-1, params.out.shape[-1]))
