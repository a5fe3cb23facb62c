"""Multi-head latent attention: keys and values of all heads come from one narrow vector a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.attend import Sight, attend, attend_cache, attend_chunk, max_scores
from agentjax.models.attention import rope_frequencies, rope_scaling, rotate, step_of
from agentjax.models.config import MlaConfig, ModelConfig
from agentjax.models.linear import down_heads, linear, up_heads
from agentjax.models.matrices import matrix_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.paged import TPU_LANES
from agentjax.models.pages import Held, read_places, reshaped, write_places
from agentjax.models.spec import ParamSpec, Weight
from pallas_kernels.kv_packet import Rotary, turn

Array = jax.Array


@flax.struct.dataclass
class Mla:
  """Projections; ``query_down`` and ``query_norm`` are None where queries are projected directly.

  ``query_in`` is query_lora, or embed without it.
  """

  query_down: Weight | None  # [embed, query_lora]
  query_norm: Weight | None  # [query_lora]
  query_nope: Weight  # [query_in, heads, nope]
  query_rope: Weight  # [query_in, heads, rope]
  latent_down: Weight  # [embed, kv_lora]
  latent_norm: Weight  # [kv_lora]
  key_rope: Weight  # [embed, rope]
  key_up: Weight  # [kv_lora, heads, nope]
  value_up: Weight  # [kv_lora, heads, value]
  out: Weight  # [heads, value, embed]


@flax.struct.dataclass
class LatentCache:
  """What every slot keeps of a token: its latent and, behind it, its rotated shared key."""

  latents: Held  # [slots, length, width], see ``latent_width``


def mla_spec(config: ModelConfig) -> Mla:
  """Abstract parameters of one latent attention block."""
  sizes = _sizes(config)
  heads = config.num_heads

  def matrix(size: int, axis: str, *to: int) -> ParamSpec:
    outputs = ("heads", "head_dim") if len(to) == 2 else (None,)
    return matrix_spec(config, (size, *to), (axis, *outputs))

  low, back = sizes.query_lora, (heads, sizes.value_dim, config.d_model)
  query_in = (config.d_model, "embed") if low is None else (low, "latent")
  return Mla(
    query_down=None if low is None else matrix(config.d_model, "embed", low),
    query_norm=None if low is None else norm_spec(low, config),
    query_nope=matrix(*query_in, heads, sizes.nope_dim),
    query_rope=matrix(*query_in, heads, sizes.rope_dim),
    latent_down=matrix(config.d_model, "embed", sizes.kv_lora),
    latent_norm=norm_spec(sizes.kv_lora, config),
    key_rope=matrix(config.d_model, "embed", sizes.rope_dim),
    key_up=matrix(sizes.kv_lora, "latent", heads, sizes.nope_dim),
    value_up=matrix(sizes.kv_lora, "latent", heads, sizes.value_dim),
    out=matrix_spec(config, back, ("heads", "head_dim", "embed")),
  )


def init_latent_cache(config: ModelConfig, slots: int, length: int) -> LatentCache:
  """Zeros, in the compute dtype."""
  shape = (slots, length, latent_width(config))
  return LatentCache(latents=jnp.zeros(shape, config.dtype))


def latent_width(config: ModelConfig) -> int:
  """Numbers kept of a token: kv_lora + rope, for the kernel on TPUs zeros up to whole lanes."""
  sizes = _sizes(config)
  width = sizes.kv_lora + sizes.rope_dim
  return -(-width // TPU_LANES) * TPU_LANES if config.kernels == "pallas_tpu" else width


def mla(
  params: Mla,
  x: Float[Array, "batch time embed"],
  config: ModelConfig,
  *,
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  sight: Sight | None = None,
) -> tuple[Float[Array, "batch time embed"], Float[Array, " heads"] | None]:
  """Attention with ``k_h = [W_uk,h c | rope(W_kr x)]`` and ``v_h = W_uv,h c``, for training.

  The latent is ``c = norm(W_dkv x)``, queries are ``[W_nope u | rope(W_rope u)]`` with
  ``u = norm(W_dq x)``, or x itself without ``query_lora``; scores are divided by
  ``sqrt(nope + rope)``. With ``align_variance`` queries and c are multiplied by
  ``sqrt(embed / query_lora)`` and ``sqrt(embed / kv_lora)`` (2509.01322).

  Returns:
    The output, and with ``record_max_scores`` the largest score of each head.

  References: DeepSeek-V2, 2405.04434.
  """
  nope, rope, latent, shared = _project(params, x, config, positions)
  query = jnp.concatenate([nope, rope], axis=-1)
  shared = jnp.broadcast_to(shared, rope.shape)
  key = jnp.concatenate([_up(latent, params.key_up), shared], axis=-1)
  how: dict[str, Any] = {
    "segment_ids": segment_ids,
    "scale": _scale(config),
    "block": config.attention_block,
  }
  top = max_scores(query, key, **how) if config.record_max_scores else None
  out = attend(query, key, _up(latent, params.value_up), **how, sight=sight)
  return _output(params, out), top


def mla_extend(
  params: Mla,
  x: Float[Array, "rows time embed"],
  cache: LatentCache,
  config: ModelConfig,
  *,
  rows: Int[Array, " rows"] | None,
  positions: Int[Array, "rows time"],
  counts: Int[Array, " rows"] | Bool[Array, " rows"],
  sees: Int[Array, "rows time"] | None = None,
) -> tuple[Float[Array, "rows time embed"], LatentCache]:
  """Appends ``counts[r]`` tokens to slot ``rows[r]`` and attends over all the slot holds.

  Args:
    rows: slot of each row; the number of slots for a row that is not used. None where row r is
      slot r.
    positions: place of each token in its slot.
    counts: tokens of each row that are not right padding.
    sees: last place of the slot that each token sees; None is its own.
  """
  query, kept = _absorb(params, x, config, positions)
  real = jnp.arange(x.shape[1]) < counts[:, None]
  place = jnp.where(real, positions, cache.latents.shape[1])
  latents = write_places(cache.latents, rows, place, kept)
  return _read(params, query, latents, config, positions, counts, rows, sees), LatentCache(latents)


mla_step = step_of(mla_extend)


def mla_chunk(
  params: Mla,
  x: Float[Array, "1 time embed"],
  cache: LatentCache,
  config: ModelConfig,
  *,
  slot: Int[Array, ""],
  start: Int[Array, ""],
) -> tuple[Float[Array, "1 time embed"], LatentCache]:
  """``attention.attention_chunk``: the cache is read only, what is to be written is returned."""
  query, kept = _absorb(params, x, config, start + jnp.arange(x.shape[1])[None])
  width = params.value_up.shape[0]

  def held(begin: Array) -> tuple[Array, Array]:
    keys = read_places(cache.latents, slot[None], begin, config.attention_block)[:, None]
    return keys, keys[..., :width]

  own = kept[:, :, None]
  read = attend_chunk(
    query,
    own,
    own[..., :width],
    held,
    start=start,
    scale=_scale(config),
    block=config.attention_block,
  )
  return _lift(params, read), LatentCache(kept)


def join_latents(entries: Sequence[Any], starts: Sequence[int], config: ModelConfig) -> LatentCache:
  """``attention.join_heads``: the shared keys are turned on, the latents stay."""
  turned = _rotary(config)
  pairs = zip(entries, starts, strict=True)
  each = [turn(entry.latents, jnp.asarray(n), turned) for entry, n in pairs]
  return LatentCache(jnp.concatenate(each, axis=1))


def _sizes(config: ModelConfig) -> MlaConfig:
  assert config.mla is not None, "validate() sees to it"
  return config.mla


def _rotary(config: ModelConfig) -> Rotary:
  """How what the cache keeps is turned: the shared key, behind the latent."""
  sizes = _sizes(config)
  assert config.rope_theta is not None, "validate() sees to it"
  frequencies = rope_frequencies(sizes.rope_dim, config.rope_theta, scaling=rope_scaling(config))
  return Rotary(frequencies, sizes.kv_lora, sizes.interleaved)


def _scale(config: ModelConfig) -> float:
  sizes = _sizes(config)
  return (sizes.nope_dim + sizes.rope_dim) ** -0.5


def _project(
  params: Mla, x: Array, config: ModelConfig, positions: Array
) -> tuple[Array, Array, Array, Array]:
  """Queries [B, T, heads, nope] and [.., rope], latent [B, T, kv_lora], key [B, T, 1, rope]."""
  sizes = _sizes(config)
  frequencies = _rotary(config).frequencies
  narrow = x
  if params.query_down is not None:
    narrow = rms_norm(linear(x, params.query_down), params.query_norm, sizes.norm_eps)
  nope, rope = _up(narrow, params.query_nope), _up(narrow, params.query_rope)
  latent = rms_norm(linear(x, params.latent_down), params.latent_norm, sizes.norm_eps)
  if sizes.align_variance:
    factor = (config.d_model / narrow.shape[-1]) ** 0.5
    nope, rope = nope * factor, rope * factor
    latent = latent * (config.d_model / sizes.kv_lora) ** 0.5
  key = linear(x, params.key_rope)[:, :, None]
  rope, key = (rotate(v, positions, frequencies, sizes.interleaved) for v in (rope, key))
  return nope, rope, latent, key


def _absorb(params: Mla, x: Array, config: ModelConfig, positions: Array) -> tuple[Array, Array]:
  """Queries against the cache [R, C, heads, width], and what it keeps of the tokens.

  ``q · W_uk c = (W_ukᵀ q) · c``: with W_uk on the side of the query, all heads read one key.
  """
  nope, rope, latent, key = _project(params, x, config, positions)
  query = down_heads(nope, params.key_up)
  kept = jnp.concatenate([latent, key[:, :, 0]], axis=-1)
  query = jnp.concatenate([query, rope], axis=-1)
  spare = latent_width(config) - kept.shape[-1]
  if spare:
    query, kept = (jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, spare)]) for v in (query, kept))
  return query, kept


def _read(
  params: Mla,
  query: Array,
  latents: Held,
  config: ModelConfig,
  positions: Array,
  counts: Array,
  rows: Array | None,
  sees: Array | None,
) -> Array:
  """``W_o W_uv sum_s p_s c_s`` over what slots hold [slots, length, width]."""
  read = attend_cache(
    query,
    reshaped(latents, lambda v: v[:, None]),
    None,
    positions=positions if sees is None else sees,
    scale=_scale(config),
    rows=rows,
    counts=counts,
    value_width=params.value_up.shape[0],
    rotary=_rotary(config),
    kernels=config.kernels if sees is None else None,
  )
  return _lift(params, read)


def _lift(params: Mla, read: Array) -> Array:
  """``W_o W_uv`` of what was read [R, C, heads, kv_lora]."""
  return _output(params, up_heads(read, params.value_up))


def _up(x: Array, weight: Array) -> Array:
  """[B, T, in] times [in, heads, width] to [B, T, heads, width]."""
  return linear(x, weight).reshape(*x.shape[:2], *weight.shape[1:])


def _output(params: Mla, heads: Array) -> Array:
  """[B, T, heads, value] to [B, T, embed]."""
  merged = heads.reshape(*heads.shape[:2], -1)
  return linear(merged, params.out)
