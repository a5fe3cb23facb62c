"""Grouped-query attention over packed rows, and over the keys and values of slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from agentjax.models.attend import Sight, attend, attend_cache, attend_chunk, max_scores
from agentjax.models.config import ModelConfig
from agentjax.models.linear import linear
from agentjax.models.matrices import matrix_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.pages import Held, read_places, write_places
from agentjax.models.spec import ParamSpec, Weight
from pallas_kernels.kv_packet import Rotary, turn

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
  """Keys (rotated, where there is a rotary embedding) and values of every slot.

  With a ``window`` a token reads only so many places back, its own included. An engine then frees
  the pages before the window; None is all places.
  """

  keys: Held  # [slots, kv_heads, length, head_dim]
  values: Held  # [slots, kv_heads, length, head_dim]
  window: int | None = flax.struct.field(pytree_node=False, default=None)


class RopeScaling(NamedTuple):
  """Stretch of a rotary embedding to longer contexts, as in Llama 3.1 ("llama3" in HF files)."""

  factor: float  # pairs that turn slowly turn this much slower
  low_frequency_factor: float  # fewer turns than this over the original length: slow
  high_frequency_factor: float  # more turns than this over the original length: left as it was
  original_length: int  # tokens the model was first trained on


def rope_frequencies(
  width: int, theta: float, *, turned: int | None = None, scaling: RopeScaling | None = None
) -> np.ndarray:
  """Radians a token of each pair of channels: ``theta^(-2i/width)``, float32 [width / 2].

  Args:
    width: channels of a head, or of the part of it that is rotated; even.
    theta: base.
    turned: pairs that turn, the others stay put (frequency 0); None is all.
    scaling: with ``turns = original_length f / 2 pi`` of a frequency f, f becomes f / factor where
      turns < low_frequency_factor, stays where turns > high_frequency_factor, and between the two
      is ``(1 - s) f / factor + s f``, ``s = (turns - low) / (high - low)``.

  References: Su et al., 2104.09864; Grattafiori et al., 2407.21783 (scaling).
  """
  pairs = np.arange(width // 2)
  frequencies = theta ** (-2.0 * pairs / width)
  if scaling is not None:
    factor, low, high, length = scaling
    turns = length * frequencies / (2.0 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    frequencies = (1.0 - kept) * frequencies / factor + kept * frequencies
  if turned is not None:
    frequencies = np.where(pairs < turned, frequencies, 0.0)
  return frequencies.astype(np.float32)


def rotate(
  x: Float[Array, "batch time heads width"],
  positions: Int[Array, "batch time"],
  frequencies: np.ndarray,
  interleaved: bool = False,
) -> Float[Array, "batch time heads width"]:
  """Turns each pair of channels by ``position * frequency``, in float32, in the dtype of x.

  Args:
    x: every channel is in one pair.
    positions: place of each token in its sequence.
    frequencies: float32 [width / 2], from ``rope_frequencies``.
    interleaved: pair i is channels 2i and 2i + 1; else i and i + width / 2.
  """
  return turn(x, positions[..., None], Rotary(frequencies, interleaved=interleaved))


def attention_spec(config: ModelConfig) -> Attention:
  """Abstract parameters of one attention block."""

  def projection(heads: int, name: str) -> ParamSpec:
    shape = (config.d_model, heads, config.head_dim)
    return matrix_spec(config, shape, ("embed", name, "head_dim"))

  def bias(heads: int, name: str) -> ParamSpec | None:
    shape = (heads, config.head_dim)
    spec = ParamSpec(shape, (name, "head_dim"), config.param_dtype, "zeros", decayed=False)
    return spec if config.attention_bias else None

  back = (config.num_heads, config.head_dim, config.d_model)
  norm = norm_spec(config.head_dim, config) if config.qk_norm else None
  return Attention(
    query=projection(config.num_heads, "heads"),
    key=projection(config.num_kv_heads, "kv_heads"),
    value=projection(config.num_kv_heads, "kv_heads"),
    out=matrix_spec(config, back, ("heads", "head_dim", "embed")),
    query_norm=norm,
    key_norm=norm,
    query_bias=bias(config.num_heads, "heads"),
    key_bias=bias(config.num_kv_heads, "kv_heads"),
    value_bias=bias(config.num_kv_heads, "kv_heads"),
  )


def init_kv_cache(
  config: ModelConfig, slots: int, length: int, *, window: int | None = None
) -> KVCache:
  """Zeros, in the compute dtype."""
  shape = (slots, config.num_kv_heads, length, config.head_dim)
  return KVCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype), window)


def attention(
  params: Attention,
  x: Float[Array, "batch time embed"],
  config: ModelConfig,
  *,
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  sight: Sight | None = None,
  added: Float[Array, "batch time kv_heads head_dim"] | None = None,
) -> tuple[Float[Array, "batch time embed"], Float[Array, " heads"] | None]:
  """``softmax(q kᵀ / sqrt(head_dim)) v``, causal and within a segment, or as ``sight`` says.

  ``added`` is added to the values.

  Returns:
    The output, and with ``record_max_scores`` the largest score of each head.
  """
  query, key, value = project_heads(params, x, config, positions, added)
  scale, block = config.head_dim**-0.5, config.attention_block
  top = None
  if config.record_max_scores:
    top = max_scores(query, key, segment_ids=segment_ids, scale=scale, block=block)
  out = attend(
    query,
    key,
    value,
    segment_ids=segment_ids,
    scale=scale,
    block=block,
    kernels=config.kernels,
    sight=sight,
  )
  return merge_heads(params, out), top


def attention_extend(
  params: Attention,
  x: Float[Array, "rows time embed"],
  cache: KVCache,
  config: ModelConfig,
  *,
  rows: Int[Array, " rows"] | None,
  positions: Int[Array, "rows time"],
  counts: Int[Array, " rows"] | Bool[Array, " rows"],
  sees: Int[Array, "rows time"] | None = None,
  added: Float[Array, "rows time kv_heads head_dim"] | None = None,
) -> tuple[Float[Array, "rows time embed"], KVCache]:
  """Appends ``counts[r]`` tokens to slot ``rows[r]`` and attends over all the slot holds.

  Args:
    rows: slot of each row; the number of slots for a row that is not used. None where row r is
      slot r.
    positions: place of each token in its slot.
    counts: tokens of each row that are not right padding.
    sees: last place of the slot that each token sees; None is its own.
    added: to the values.
  """
  query, key, value = project_heads(params, x, config, positions, added)
  cache = append_rows(cache, key, value, rows=rows, positions=positions, counts=counts)
  scale = config.head_dim**-0.5
  out = attend_cache(
    query,
    cache.keys,
    cache.values,
    positions=positions if sees is None else sees,
    scale=scale,
    rows=rows,
    counts=counts,
    rotary=rotary(config),
    kernels=config.kernels if sees is None else None,
  )
  return merge_heads(params, out), cache


def step_of(extend: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
  """The step that belongs to an ``extend`` of slots: ``(..., lengths, active) -> (out, cache)``.

  It is one token [slots, embed] for every active slot, written at ``lengths``: a row for each.
  """

  def step(params: Any, x: Array, *how: Any, lengths: Array, active: Array) -> tuple[Array, Any]:
    positions = jnp.where(active, lengths, 0)[:, None]  # what idle slots hold need not be read
    out, cache = extend(params, x[:, None], *how, rows=None, positions=positions, counts=active)
    return out[:, 0], cache

  return step


attention_step = step_of(attention_extend)


def attention_chunk(
  params: Attention,
  x: Float[Array, "1 time embed"],
  cache: KVCache,
  config: ModelConfig,
  *,
  slot: Int[Array, ""],
  start: Int[Array, ""],
) -> tuple[Float[Array, "1 time embed"], KVCache]:
  """The tokens from place ``start`` of a slot on; the cache is read only.

  Returns:
    The output, and keys and values of these tokens, to be written at ``start``.
  """
  query, key, value = project_heads(params, x, config, start + jnp.arange(x.shape[1])[None])

  def held(begin: Array) -> tuple[Array, Array]:
    size = config.attention_block
    keys = read_places(cache.keys, slot[None], begin, size)
    return keys, read_places(cache.values, slot[None], begin, size)

  out = attend_chunk(
    query,
    key,
    value,
    held,
    start=start,
    scale=config.head_dim**-0.5,
    block=config.attention_block,
  )
  new = KVCache(keys=jnp.moveaxis(key, 1, 2), values=jnp.moveaxis(value, 1, 2))
  return merge_heads(params, out), new


def join_heads(entries: Sequence[Any], starts: Sequence[int], turned: Rotary | None) -> KVCache:
  """Keys and values one after the other, keys turned on to where they now stand.

  Args:
    entries: ``KVCache`` of slots that each began empty, of arrays cut to their tokens.
    starts: positions of their first tokens.
    turned: of the keys; None where they have no positions.
  """
  keys = [entry.keys for entry in entries]
  if turned is not None:
    keys = [turn(key, jnp.asarray(n), turned) for key, n in zip(keys, starts, strict=True)]
  values = [entry.values for entry in entries]
  return dataclasses.replace(
    entries[0], keys=jnp.concatenate(keys, axis=2), values=jnp.concatenate(values, axis=2)
  )


def append_rows(
  cache: KVCache,
  key: Float[Array, "rows time kv_heads head_dim"],
  value: Float[Array, "rows time kv_heads head_dim"],
  *,
  rows: Int[Array, " rows"] | None,
  positions: Int[Array, "rows time"],
  counts: Int[Array, " rows"] | Bool[Array, " rows"],
) -> KVCache:
  """The cache with ``counts[r]`` more tokens in slot ``rows[r]`` (see ``attention_extend``)."""
  real = jnp.arange(key.shape[1]) < counts[:, None]
  place = jnp.where(real, positions, cache.keys.shape[2])
  return dataclasses.replace(
    cache,
    keys=write_places(cache.keys, rows, place, key),
    values=write_places(cache.values, rows, place, value),
  )


def project_heads(
  params: Attention,
  x: Array,
  config: ModelConfig,
  positions: Array,
  added: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Query [B, T, heads, head_dim], key and value [B, T, kv_heads, head_dim].

  ``added`` is added to the values.
  """
  pairs = (
    (params.query, params.query_bias),
    (params.key, params.key_bias),
    (params.value, params.value_bias),
  )
  query, key, value = (linear(x, w, bias).reshape(*x.shape[:2], *w.shape[1:]) for w, bias in pairs)
  if params.query_norm is not None and params.key_norm is not None:
    query = rms_norm(query, params.query_norm, config.norm_eps)
    key = rms_norm(key, params.key_norm, config.norm_eps)
  turned = rotary(config)
  if turned is not None:
    query, key = (rotate(v, positions, turned.frequencies) for v in (query, key))
  return query, key, value if added is None else value + added


def rotary(config: ModelConfig) -> Rotary | None:
  """How keys are turned; None without a rotary embedding."""
  if config.rope_theta is None:
    return None
  return Rotary(rope_frequencies(config.head_dim, config.rope_theta, scaling=rope_scaling(config)))


def rope_scaling(config: ModelConfig) -> RopeScaling | None:
  """What ``config.rope_scaling_factor`` and the fields behind it say; None without."""
  if config.rope_scaling_factor is None:
    return None
  return RopeScaling(
    config.rope_scaling_factor,
    config.rope_low_freq_factor,
    config.rope_high_freq_factor,
    config.rope_original_length,
  )


def merge_heads(params: Attention, heads: Array) -> Array:
  """[B, T, heads, head_dim] to [B, T, embed]."""
  merged = heads.reshape(*heads.shape[:2], -1)
  return linear(merged, params.out)
