"""Parcae (2604.12946): a middle of the pattern that runs several times, and its attention.

The looped core is that of Parcae (2604.12946): the pattern is cut into prelude, core and coda
(``config.loop``), and the core runs T times on a state h that starts at h_0 and forgets:

    e = norm(prelude(x))
    h <- core(exp(-D exp(A)) * h + D * (e Bᵀ)),    D = softplus(dt_bias),  T times
    y = coda(C h)

A and D hold a number a channel, so that the linear part of an iteration has a spectral radius below
1 whatever the parameters are. In training T is drawn for every sequence, a sequence whose
iterations are done idles, and gradients go through the last iterations only. Query and key norms
and the rotary embedding are the options of any attention.

h_0 is a normal of the embedding's deviation, cut at three of them. Parcae's code draws it anew in
every call, in training, evaluation and generation alike. Here supervised training does so: the draw
of a token is addressed by the update, the sequence and the token. In scoring and sampling, which
must agree, the address is a function of the sequence alone (``LoopConfig.start_by``), ours: sampler
and trainer draw the same, a rerun too, and sequences share what they share a beginning of, as a
cache of prefixes does.

``V`` blocks are attention whose values get an embedding of the token: with the normed input x
``v_h + 2 sigmoid(g_h · x[:32]) E[token]_h`` for each key head h. E and g are a block's own. Every
second attention layer of Parcae is one, as its code has it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from agentjax.models.attention import (
  Attention,
  KVCache,
  attention,
  attention_extend,
  attention_spec,
  init_kv_cache,
  join_heads,
  rotary,
)
from agentjax.models.blocks import KINDS, Appended, BlockReport, Rows, Stepped, residual_block
from agentjax.models.config import ModelConfig
from agentjax.models.linear import linear
from agentjax.models.matrices import matrix_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.pages import Held, Paged, is_paged, reshaped
from agentjax.models.passes import DecodeSection, PassKind, RunDecodeSection, RunSection, Section
from agentjax.models.spec import ParamSpec, Weight
from agentjax.models.stack import look_up

Array = jax.Array

_BELOW_ONE = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
_GATE_CHANNELS = 32  # of the input, that the gates of value embeddings read
_FACTOR = 0x9E3779B1  # odd, so that no id that went before is lost from a hash


@flax.struct.dataclass
class Injection:
  """What a looped core has beside its blocks."""

  norm: Weight  # [embed], of what the prelude gives
  decay_rate: Weight  # [embed] float32, A
  step_bias: Weight  # [embed] float32, dt_bias
  into: Weight  # [embed, embed], Bᵀ
  out: Weight  # [embed, embed], Cᵀ


class Draws(NamedTuple):
  """What sequences draw in an update, the same for all tokens of a sequence, [B, T].

  Attributes:
    depths: int32, iterations.
    salts: uint32, numbers that the draws of start states are addressed by, besides what they are
      addressed by in scoring; None for the states of scoring.
  """

  depths: Array
  salts: Array | None = None


@flax.struct.dataclass
class Hashed:
  """Entry of the first block of a core whose start states go by the sequence.

  Attributes:
    history: uint32 [slots], ``hash_histories`` of the ids of each slot; 0 if it is empty.
    own: the entry of the block.
  """

  history: Array
  own: Any


@flax.struct.dataclass
class ValueAttention:
  """Attention with an embedding of the token added to its values."""

  attention: Attention
  table: Weight  # [vocab, kv_heads * head_dim]
  gate: Weight  # [channels, kv_heads]


def injection_spec(config: ModelConfig) -> Injection:
  """Abstract parameters: A = 0, a decay of sqrt(1/5) an iteration, B the identity, C too (ours).

  A, dt_bias and B are free of weight decay, as in Parcae.
  """
  width, step = config.d_model, 0.5 * math.log(5.0)
  square = ParamSpec((width, width), ("embed", None), config.param_dtype, "identity")
  return Injection(
    norm=norm_spec(width, config),
    decay_rate=ParamSpec((width,), (None,), init="zeros", decayed=False, wide=True),
    step_bias=ParamSpec(
      (width,), (None,), init="step_bias", low=step, high=step, decayed=False, wide=True
    ),
    into=dataclasses.replace(square, decayed=False),
    out=square,
  )


def decay_and_step(
  params: Injection,
) -> tuple[Float[Array, " embed"], Float[Array, " embed"]]:
  """``exp(-D exp(A))`` and ``D = softplus(dt_bias)``, float32.

  The first is in [0, 1) for all finite parameters: D exp(A) is summed as logarithms, and where its
  exponential would round to 1 it is the number below.
  """
  step = jax.nn.softplus(params.step_bias)
  # log softplus(b) is b where softplus is too small for float32.
  small = params.step_bias < -15.0
  log_step = jnp.where(small, params.step_bias, jnp.log(jnp.where(small, 1.0, step)))
  rate = jnp.exp(jnp.minimum(log_step + params.decay_rate, 10.0))
  return jnp.minimum(jnp.exp(-rate), _BELOW_ONE), step


def sample_depths(
  config: ModelConfig, key: Array, sequence_ids: Int[Array, "batch time"]
) -> Int[Array, "batch time"]:
  """Iterations of every sequence, ``max(1, Poisson(config.loop.mean_depth))``.

  A draw is addressed by the key and the sequence: its depth is the same wherever it is packed. It
  is a float32 uniform through the inverse distribution function, so that depths rarer than 2^-24
  never come.

  Args:
    config: with a ``loop``.
    key: of the update.
    sequence_ids: int32, the sequence a token belongs to, unique in the batch; any on padding.
  """
  assert config.loop is not None
  mean = config.loop.mean_depth
  term, cumulative = math.exp(-mean), [math.exp(-mean)]
  while 1.0 - cumulative[-1] > 2.0**-24:
    term *= mean / len(cumulative)
    cumulative.append(cumulative[-1] + term)

  def draw(sequence: Array) -> Array:
    uniform = jax.random.uniform(jax.random.fold_in(key, sequence))
    return jnp.sum(uniform >= jnp.asarray(cumulative, jnp.float32))

  return jnp.maximum(jax.vmap(jax.vmap(draw))(sequence_ids), 1).astype(jnp.int32)


def draw_sequences(
  config: ModelConfig, key: Array, sequence_ids: Int[Array, "batch time"]
) -> Draws:
  """Iterations and salts of every sequence (see ``sample_depths``)."""

  def salt(sequence: Array) -> Array:
    return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sequence), 1))

  salts = jax.vmap(jax.vmap(salt))(sequence_ids)
  return Draws(sample_depths(config, key, sequence_ids), salts)


def hash_histories(
  token_ids: Int[Array, "batch time"], begins: Array, before: Array
) -> UInt32[Array, "batch time"]:
  """``h_t = c h_(t-1) + mix(token_t)`` modulo 2^32, of every token and those before it; ours.

  Whole numbers have no rounding: a hash is the same however its tokens are cut into calls.

  Args:
    token_ids: of rows.
    begins: bool, broadcast to [B, T]: ``before`` stands for the h before these tokens.
    before: uint32, broadcast to [B, T]: what the first token of a sequence or of a call goes on
      from.
  """
  factor = jnp.uint32(_FACTOR)
  mixed = _mix(token_ids)
  begins = jnp.broadcast_to(begins, mixed.shape)
  factors = jnp.where(begins, jnp.uint32(0), factor)
  sums = jnp.where(begins, factor * before + mixed, mixed)

  def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    return left[0] * right[0], right[0] * left[1] + right[1]

  return jax.lax.associative_scan(join, (factors, sums), axis=1)[1]


def _mix(token_ids: Array) -> Array:
  """uint32, all bits of an id spread over all bits of a number (the finaliser of MurmurHash3)."""
  h = token_ids.astype(jnp.uint32) + jnp.uint32(1)  # which 0 maps to 0
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


def run_core(
  params: Injection,
  x: Float[Array, "batch time embed"],
  token_ids: Int[Array, "batch time"],
  sections: tuple[Section, ...],
  config: ModelConfig,
  rows: Rows,
  drawn: Draws | None,
  run: RunSection,
) -> tuple[Float[Array, "batch time embed"], list[BlockReport]]:
  """Prelude, the core as often as ``drawn.depths`` says, coda.

  What comes before the last iterations of a sequence (``config.loop.gradient_depth``) runs in a
  loop without a gradient, which ends with the deepest sequence of the batch; the others run in a
  scan. Each is compiled once. A sequence whose iterations are done is computed on, but keeps its
  state.

  Args:
    params: of the injection.
    x: embedded tokens.
    token_ids: of x.
    sections: prelude, core and coda.
    config: of the model.
    rows: of x.
    drawn: of the sequence that a token belongs to; None is ``fixed_depth`` for all, and the start
      states of sampling.
    run: applies a section.

  Returns:
    The stream after the coda, and the reports of all blocks; those of the core are the maxima over
    the iterations with a gradient.
  """
  assert config.loop is not None
  prelude, core, coda = sections
  last = config.loop.gradient_depth
  if last is None:
    last = -(-config.loop.mean_depth // 2)
  if drawn is None:
    last = min(last, config.loop.fixed_depth)
    depths = jnp.full(rows.segment_ids.shape, config.loop.fixed_depth, jnp.int32)
  else:
    depths = drawn.depths
  depths = jnp.where(rows.segment_ids == 0, 0, depths)
  early = jnp.maximum(depths - last, 0)

  x, before = run(x, prelude)
  kept, drive = _drive(params, x, config)
  learned = (kept, drive, core.groups)
  fixed = jax.lax.stop_gradient(learned)

  def iterate(weights: Any, state: Array, more: Array) -> tuple[Array, list[BlockReport]]:
    kept, drive, groups = weights
    new, reports = run(_inject(kept, drive, state), core._replace(groups=groups))
    return jnp.where(more[..., None], new, state), reports

  def without_gradient(carry: tuple[Array, Array]) -> tuple[Array, Array]:
    i, state = carry
    return i + 1, iterate(fixed, state, i < early)[0]

  salts = None if drawn is None else drawn.salts
  histories = None
  if by_sequence(config):
    others = rows.segment_ids[:, 1:] != rows.segment_ids[:, :-1]
    begins = jnp.pad(others, ((0, 0), (1, 0)), constant_values=True)
    histories = hash_histories(token_ids, begins, jnp.uint32(0) if salts is None else salts)
  _, state = jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(early),
    without_gradient,
    (jnp.zeros((), jnp.int32), start_states(config, rows.positions, histories, salts)),
  )
  state, reports = jax.lax.scan(
    lambda state, i: iterate(learned, state, i < depths - early), state, jnp.arange(last)
  )
  within = [jax.tree.map(lambda v: jnp.max(v, axis=0), report) for report in reports]
  x, after = run(linear(state, params.out), coda)
  return x, before + within + after


def decode_core(
  params: Injection,
  x: Float[Array, "*lead embed"],
  token_ids: Int[Array, "*lead"],
  sections: tuple[DecodeSection, ...],
  config: ModelConfig,
  where: Appended | Stepped,
  run: RunDecodeSection,
) -> tuple[Float[Array, "*lead embed"], tuple[Any, ...], list[Array]]:
  """The same at ``fixed_depth`` over the entries of slots, see ``init_entries``.

  Args:
    params, config: see ``run_core``.
    x: [R, C, embed], or [S, embed] for a step.
    token_ids: of x.
    sections: prelude, core and coda.
    where: what ``extend`` or ``step`` of a block gets.
    run: applies a section; ``where`` can be given to it.

  Returns:
    The stream after the coda, the entries of all blocks, the experts of its routers.
  """
  assert config.loop is not None
  depth = config.loop.fixed_depth
  prelude, core, coda = sections
  x, before, routed = run(x, prelude)
  if isinstance(where, Stepped):
    slots = jnp.arange(x.shape[0])
    appended = Appended(
      rows=jnp.where(where.active, slots, x.shape[0]),
      positions=where.lengths[:, None],
      counts=where.active.astype(jnp.int32),
    )
  else:
    appended = where
  inputs = x.reshape(*appended.positions.shape, -1)
  token_ids = token_ids.reshape(appended.positions.shape)
  given = jax.tree.map(lambda v: v.reshape(appended.positions.shape), core.given)
  core = core._replace(given=given)
  kept, drive = _drive(params, inputs, config)

  def iterate(i: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
    state, entries = carry
    # Iteration i of slot s is row s * depth + i of what the block takes for slots.
    here = appended._replace(rows=appended.rows * depth + i)
    section = core._replace(entries=entries)
    state, entries, _ = run(_inject(kept, drive, state), section, where=here)
    return state, entries

  held, histories, ended = core.entries, None, None
  if by_sequence(config):
    first, *others = core.entries
    histories, ended = _go_on(first.history, token_ids, appended)
    held = (first.own, *others)
  flat = flattened(held, depth)
  state = start_states(config, appended.positions, histories)
  state, flat = jax.lax.fori_loop(0, depth, iterate, (state, flat))
  within = unflattened(flat, depth)
  if ended is not None:
    within = (Hashed(ended, within[0]), *within[1:])
  x, after, routed_after = run(linear(state, params.out).reshape(x.shape), coda)
  return x, (*before, *within, *after), routed + routed_after


def flattened(entries: Any, depth: int) -> Any:
  """Entries [rows, depth, ...] as those of ``rows * depth`` rows."""

  def merge(held: Held) -> Held:
    merged = reshaped(held, lambda v: v.reshape(-1, *v.shape[2:]))
    if not isinstance(merged, Paged):
      return merged
    table = merged.table[:, None] * depth + jnp.arange(depth)[:, None]
    table = table.reshape(-1, table.shape[2])
    return dataclasses.replace(merged, table=table, empty=merged.empty * depth)

  return jax.tree.map(merge, entries, is_leaf=is_paged)


def unflattened(entries: Any, depth: int) -> Any:
  """Inverse of ``flattened``."""

  def split(held: Held) -> Held:
    parted = reshaped(held, lambda v: v.reshape(-1, depth, *v.shape[1:]))
    if not isinstance(parted, Paged):
      return parted
    return dataclasses.replace(
      parted, table=parted.table[::depth] // depth, empty=parted.empty // depth
    )

  return jax.tree.map(split, entries, is_leaf=is_paged)


def init_entries(config: ModelConfig, slots: int, length: int) -> tuple[Any, ...]:
  """A block of the core keeps its past of every iteration, along a second axis of ``fixed_depth``.

  The others keep what their kind makes. The first one of the core also keeps a hash of the ids, if
  start states go by the sequence.
  """
  assert config.loop is not None
  depth = config.loop.fixed_depth
  entries = []
  for index, pattern in enumerate(config.sections):
    for kind in pattern:
      if index != 1:
        entries.append(KINDS[kind].init_cache(config, slots, length))
        continue
      entry = KINDS[kind].init_cache(config, slots * depth, length)
      entries.append(jax.tree.map(lambda v: v.reshape(slots, -1, *v.shape[1:]), entry))
  if by_sequence(config):
    first = config.loop.prelude
    entries[first] = Hashed(jnp.zeros((slots,), jnp.uint32), entries[first])
  return tuple(entries)


def _drive(params: Injection, x: Array, config: ModelConfig) -> tuple[Array, Array]:
  """Decay [embed] and what every iteration adds [..., embed], both float32."""
  kept, step = decay_and_step(params)
  inputs = rms_norm(x, params.norm, config.norm_eps)
  return kept, step * linear(inputs, params.into).astype(jnp.float32)


def _inject(kept: Array, drive: Array, state: Array) -> Array:
  return (kept * state.astype(jnp.float32) + drive).astype(state.dtype)


def by_sequence(config: ModelConfig) -> bool:
  """Whether the start state of a token depends on the ids up to it."""
  assert config.loop is not None
  return config.loop.start == "normal" and config.loop.start_by == "sequence"


def start_states(
  config: ModelConfig,
  positions: Int[Array, "batch time"],
  histories: UInt32[Array, "batch time"] | None,
  salts: UInt32[Array, "batch time"] | None = None,
) -> Float[Array, "batch time embed"]:
  """States before the first iteration.

  Args:
    config: of the model.
    positions: place of each token in its sequence.
    histories: what draws are addressed by, where they go by the sequence; None elsewhere.
    salts: of the sequences, which histories hold already; None in scoring and sampling.
  """
  assert config.loop is not None
  shape = (*positions.shape, config.d_model)
  if config.loop.start == "zeros":
    return jnp.zeros(shape, config.dtype)
  key = jax.random.key(config.loop.start_seed, impl="threefry2x32")
  if histories is not None:
    addresses: tuple[Array, ...] = (histories,)
  else:
    addresses = (positions,) if salts is None else (salts, positions)

  def draw(*address: Array) -> Array:
    return jax.random.truncated_normal(
      functools.reduce(jax.random.fold_in, address, key), -3.0, 3.0, (config.d_model,), jnp.float32
    )

  scale = config.init_scale * config.d_model**-0.5
  return (scale * jax.vmap(jax.vmap(draw))(*addresses)).astype(config.dtype)


def _go_on(history: Array, token_ids: Array, appended: Appended) -> tuple[Array, Array]:
  """Hashes [R, C] of what slots hold and their tokens, and those that slots [S] end with."""
  before = history.at[appended.rows].get(mode="clip")[:, None]
  first = jnp.arange(token_ids.shape[1]) == 0
  hashes = hash_histories(token_ids, first, before)
  every = jnp.concatenate([before, hashes], axis=1)
  last = jnp.take_along_axis(every, appended.counts[:, None], axis=1)[:, 0]
  return hashes, history.at[appended.rows].set(last, mode="drop")


LOOP = PassKind(
  field="loop",
  spec=injection_spec,
  forward=run_core,
  decode=decode_core,
  init_entries=init_entries,
  draw=draw_sequences,
)


def value_attention_spec(config: ModelConfig) -> ValueAttention:
  """Abstract parameters of a ``V`` block.

  The table is N(0, 1) and the gates have the deviation of Parcae's, whose code leaves both as
  PyTorch makes them: an embedding, and a uniform draw within ±1 / sqrt(channels).
  """
  channels, width = min(_GATE_CHANNELS, config.d_model), config.num_kv_heads * config.head_dim
  gate = matrix_spec(config, (channels, config.num_kv_heads), (None, "kv_heads"))
  return ValueAttention(
    attention=attention_spec(config),
    table=ParamSpec((config.vocab_size, width), ("vocab", "embed"), config.param_dtype),
    gate=dataclasses.replace(gate, scale=(3.0 * channels) ** -0.5),
  )


def _added(params: ValueAttention, x: Array, config: ModelConfig, token_ids: Array) -> Array:
  """What is added to values, [B, T, kv_heads, head_dim]."""
  values = look_up(params.table.astype(config.dtype), token_ids)
  gates = linear(x[..., : params.gate.shape[0]], params.gate).astype(jnp.float32)
  gates = (2.0 * jax.nn.sigmoid(gates)).astype(config.dtype)
  return gates[..., None] * values.reshape(*gates.shape, config.head_dim)


def _value_forward(
  params: ValueAttention, x: Array, config: ModelConfig, rows: Rows, given: Array
) -> tuple[Array, BlockReport]:
  out, top = attention(
    params.attention,
    x,
    config,
    segment_ids=rows.segment_ids,
    positions=rows.positions,
    sight=rows.sight,
    added=_added(params, x, config, given),
  )
  return out, BlockReport(max_scores=None if top is None else top[None])


def _value_extend(
  params: ValueAttention,
  x: Array,
  entry: KVCache,
  config: ModelConfig,
  appended: Appended,
  given: Array,
) -> tuple[Array, KVCache, None]:
  added = _added(params, x, config, given)
  where = appended._asdict()
  return *attention_extend(params.attention, x, entry, config, **where, added=added), None


def _value_step(
  params: ValueAttention,
  x: Array,
  entry: KVCache,
  config: ModelConfig,
  stepped: Stepped,
  given: Array,
) -> tuple[Array, KVCache, None]:
  out, entry = attention_extend(
    params.attention,
    x[:, None],
    entry,
    config,
    rows=None,
    positions=jnp.where(stepped.active, stepped.lengths, 0)[:, None],
    counts=stepped.active,
    added=_added(params, x[:, None], config, given[:, None]),
  )
  return out[:, 0], entry, None


BLOCK = residual_block(
  value_attention_spec,
  forward=_value_forward,
  extend=_value_extend,
  step=_value_step,
  init_cache=init_kv_cache,
  join=lambda params, entries, starts, config: join_heads(entries, starts, rotary(config)),
  reads_tokens=True,
)
