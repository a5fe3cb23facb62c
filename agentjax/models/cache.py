"""Decoding: slots that keep keys, values, convolution tails and recurrent states between calls."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.attention import (
  Attention,
  KVCache,
  attention_extend,
  attention_step,
  init_kv_cache,
)
from agentjax.models.config import ModelConfig
from agentjax.models.heads import compute_logits
from agentjax.models.mamba2 import (
  Mamba2,
  MambaCache,
  init_mamba_cache,
  mamba2_extend,
  mamba2_step,
)
from agentjax.models.mlp import Mlp, mlp
from agentjax.models.moe import Moe, moe
from agentjax.models.norm import rms_norm
from agentjax.models.stack import Block, DecodeParams, Params, unstack

Array = jax.Array


@flax.struct.dataclass
class Cache:
  """State of some slots, each one context. What ``read_slots`` returns is a smaller ``Cache``.

  Attributes:
    blocks: per character of the pattern a KVCache, a MambaCache or None.
    lengths: int32 [slots], tokens each slot holds.
  """

  blocks: tuple[KVCache | MambaCache | None, ...]
  lengths: Array

  @property
  def slots(self) -> int:
    """Number of slots, static."""
    return self.lengths.shape[0]


def prepare_decode_params(params: Params, config: ModelConfig) -> DecodeParams:
  """Unstacks the layers and casts to the compute dtype what is used in it."""

  def cast(block: Block) -> Block:
    if block.norm.dtype == config.dtype:
      return block
    mixer = block.mixer
    narrow = jax.tree.map(lambda w: w.astype(config.dtype), mixer)
    if isinstance(mixer, Moe):
      narrow = dataclasses.replace(narrow, router=mixer.router, router_bias=mixer.router_bias)
    if isinstance(mixer, Mamba2):
      narrow = dataclasses.replace(
        narrow, step_bias=mixer.step_bias, decay_rate=mixer.decay_rate, skip=mixer.skip
      )
    return Block(norm=block.norm, mixer=narrow)

  return DecodeParams(
    embedding=params.embedding.astype(config.dtype),
    blocks=tuple(cast(block) for block in unstack(params, config)),
    final_norm=params.final_norm,
    lm_head=None if params.lm_head is None else params.lm_head.astype(config.dtype),
  )


def init_cache(config: ModelConfig, slots: int, max_length: int) -> Cache:
  """Empty slots that hold up to ``max_length`` tokens each.

  A power of two is the number of slots to take: on CPU, XLA may round exponentials differently in
  the remainder of a vector loop, so that in an odd number of slots the last ones can differ from
  the others in the last bit. The same holds for rows times time in ``extend``.
  """

  def entry(kind: str) -> KVCache | MambaCache | None:
    if kind == "*":
      return init_kv_cache(config, slots, max_length)
    return init_mamba_cache(config, slots) if kind == "M" else None

  return Cache(
    blocks=tuple(entry(kind) for kind in config.pattern),
    lengths=jnp.zeros((slots,), jnp.int32),
  )


def extend(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  rows: Int[Array, " rows"],
  token_ids: Int[Array, "rows time"],
  counts: Int[Array, " rows"],
) -> tuple[Float[Array, "rows vocab"], Cache]:
  """Appends tokens to some slots; prefill is the same thing on an empty slot.

  A slot's result depends on nothing but its own past and tokens (and the shapes). The caller keeps
  ``length + count <= max_length``: keys and values past the end are lost.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params.
    cache: donate it, so that it is updated in place.
    rows: slot of each row, no slot twice; out of range for a row that is not used.
    token_ids: [R, C], right-padded.
    counts: tokens of each row that are not padding; a row with 0 leaves its slot as it was.

  Returns:
    Float32 logits [R, vocab] after the last token of each row, of no meaning where the count is 0,
    and the cache.
  """
  used = (rows >= 0) & (rows < cache.slots) & (counts > 0)
  rows = jnp.where(used, rows, cache.slots)
  starts = cache.lengths.at[rows].get(mode="clip")
  positions = starts[:, None] + jnp.arange(token_ids.shape[1])
  entries: list[KVCache | MambaCache | None] = []
  x = params.embedding[token_ids]
  for block, entry in zip(params.blocks, cache.blocks, strict=True):
    inputs = rms_norm(x, block.norm, config.norm_eps)
    match block.mixer, entry:
      case Attention() as mixer, KVCache():
        out, entry = attention_extend(
          mixer, inputs, entry, config, rows=rows, positions=positions, counts=counts
        )
      case Mamba2() as mixer, MambaCache():
        out, entry = mamba2_extend(mixer, inputs, entry, config, rows=rows, counts=counts)
      case _:
        out = _stateless(block, inputs, config)
    x = x + out
    entries.append(entry)
  last = jnp.maximum(counts - 1, 0)[:, None, None]
  hidden = jnp.take_along_axis(x, last, axis=1)[:, 0]
  hidden = rms_norm(hidden, params.final_norm, config.norm_eps)
  lengths = cache.lengths.at[rows].add(counts, mode="drop")
  return compute_logits(params, hidden), Cache(blocks=tuple(entries), lengths=lengths)


def decode_step(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  token_ids: Int[Array, " slots"],
  active: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots vocab"], Cache]:
  """Appends one token to every active slot and returns the logits of the next.

  Inactive slots keep keys, values, tail, state and length bit for bit; their logits mean nothing.
  A slot's result depends on nothing but its own past. The caller keeps ``length < max_length`` in
  every active slot.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params.
    cache: donate it, so that it is updated in place.
    token_ids: [S]; any id in an inactive slot.
    active: bool [S].

  Returns:
    Float32 logits [S, vocab], and the cache.
  """
  entries: list[KVCache | MambaCache | None] = []
  x = params.embedding[token_ids]
  for block, entry in zip(params.blocks, cache.blocks, strict=True):
    inputs = rms_norm(x, block.norm, config.norm_eps)
    match block.mixer, entry:
      case Attention() as mixer, KVCache():
        out, entry = attention_step(
          mixer, inputs, entry, config, lengths=cache.lengths, active=active
        )
      case Mamba2() as mixer, MambaCache():
        out, entry = mamba2_step(mixer, inputs, entry, config, active=active)
      case _:
        out = _stateless(block, inputs, config)
    x = x + out
    entries.append(entry)
  hidden = rms_norm(x, params.final_norm, config.norm_eps)
  lengths = cache.lengths + active.astype(jnp.int32)
  return compute_logits(params, hidden), Cache(blocks=tuple(entries), lengths=lengths)


def read_slots(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
  """Copies of some slots, to be parked or written elsewhere. ``rows`` must be in range."""
  return jax.tree.map(lambda v: v[rows], cache)


def write_slots(cache: Cache, rows: Int[Array, " rows"], states: Cache) -> Cache:
  """Puts ``states`` into the slots ``rows``; a row at or past the number of slots is dropped."""
  return jax.tree.map(lambda v, s: v.at[rows].set(s, mode="drop"), cache, states)


def copy_slot(cache: Cache, source: int | Array, targets: Int[Array, " targets"]) -> Cache:
  """Forks one slot into others; a target at or past the number of slots is dropped."""
  return jax.tree.map(
    lambda v: v.at[targets].set(
      jnp.broadcast_to(v[source], (targets.shape[0], *v.shape[1:])), mode="drop"
    ),
    cache,
  )


def reset_slots(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
  """Empties some slots: length, tail and state become 0, old keys and values are never seen."""

  def clear(v: Array) -> Array:
    return v.at[rows].set(0, mode="drop")

  blocks = tuple(
    jax.tree.map(clear, entry) if isinstance(entry, MambaCache) else entry for entry in cache.blocks
  )
  return Cache(blocks=blocks, lengths=clear(cache.lengths))


def _stateless(block: Block, x: Array, config: ModelConfig) -> Array:
  match block.mixer:
    case Mlp() as mixer:
      return mlp(mixer, x)
    case Moe() as mixer:
      return moe(mixer, x, config, real=jnp.ones(x.shape[:-1], bool))[0]
  raise TypeError(f"a {type(block.mixer).__name__} block needs a cache entry, got None.")
