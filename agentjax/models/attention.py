"""Grouped-query attention over packed rows, and over the keys and values of slots."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.attend import attend, attend_cache
from agentjax.models.config import ModelConfig
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.products import linear
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array


@flax.struct.dataclass
class Attention:
  """Projections; norms are None without ``qk_norm``, biases without ``attention_bias``."""

  query: Weight  # [embed, heads, head_dim]
  key: Weight  # [embed, kv_heads, head_dim]
  value: Weight  # [embed, kv_heads, head_dim]
  out: Weight  # [heads, head_dim, embed]
  query_norm: Weight | None  # [head_dim]
  key_norm: Weight | None  # [head_dim]
  query_bias: Weight | None  # [heads, head_dim]
  key_bias: Weight | None  # [kv_heads, head_dim]
  value_bias: Weight | None  # [kv_heads, head_dim]


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

  def bias(heads: int, name: str) -> ParamSpec | None:
    shape = (heads, config.head_dim)
    spec = ParamSpec(shape, (name, "head_dim"), config.param_dtype, "zeros", decayed=False)
    return spec if config.attention_bias else None

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
    query_bias=bias(config.num_heads, "heads"),
    key_bias=bias(config.num_kv_heads, "kv_heads"),
    value_bias=bias(config.num_kv_heads, "kv_heads"),
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
  """``softmax(q kᵀ / sqrt(head_dim)) v``, causal and within a segment."""
  query, key, value = _project(params, x, config, positions)
  out = attend(
    query,
    key,
    value,
    segment_ids=segment_ids,
    scale=config.head_dim**-0.5,
    block=config.attention_block,
  )
  return _output(params, out)


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
  out = attend_cache(
    query,
    cache.keys.at[rows].get(mode="clip"),
    cache.values.at[rows].get(mode="clip"),
    positions=positions,
    scale=config.head_dim**-0.5,
  )
  return _output(params, out), cache


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
  out = attend_cache(
    query, cache.keys, cache.values, positions=lengths[:, None], scale=config.head_dim**-0.5
  )
  return _output(params, out)[:, 0], cache


def _project(
  params: Attention, x: Array, config: ModelConfig, positions: Array
) -> tuple[Array, Array, Array]:
  """Query [B, T, heads, head_dim], key and value [B, T, kv_heads, head_dim]."""
  pairs = (
    (params.query, params.query_bias),
    (params.key, params.key_bias),
    (params.value, params.value_bias),
  )
  query, key, value = (linear(x, w, bias).reshape(*x.shape[:2], *w.shape[1:]) for w, bias in pairs)
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


def _output(params: Attention, heads: Array) -> Array:
  """[B, T, heads, head_dim] to [B, T, embed]."""
  merged = heads.reshape(*heads.shape[:2], -1)
  return linear(merged, params.out.reshape(-1, params.out.shape[-1]))
