"""Parcae's looped core (2604.12946): a middle of the pattern that runs several times.

The looped core is that of Parcae (2604.12946): the pattern is cut into prelude, core and coda
(``config.loop``), and the core runs T times on a state h that starts at h_0 and forgets:

    e = norm(prelude(x))
    h <- core(exp(-D exp(A)) * h + D * (e Bᵀ)),    D = softplus(dt_bias),  T times
    y = coda(C h)

A and D hold a number a channel, so that the linear part of an iteration has a spectral radius below
1 whatever the parameters are. In training T is drawn for every sequence, a sequence whose
iterations are done idles, and gradients go through the last iterations only. Query and key norms
and the rotary embedding are the options of any attention; value embeddings are left out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from agentjax.models.blocks import KINDS, Appended, BlockReport, Rows, Stepped
from agentjax.models.config import ModelConfig
from agentjax.models.linear import linear
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.pages import Held, Paged, is_paged, reshaped
from agentjax.models.passes import DecodeSection, PassKind, RunDecodeSection, RunSection, Section
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array

_BELOW_ONE = float(np.nextafter(np.float32(1.0), np.float32(0.0)))


@flax.struct.dataclass
class Injection:
  """What a looped core has beside its blocks."""

  norm: Weight  # [embed], of what the prelude gives
  decay_rate: Weight  # [embed] float32, A
  step_bias: Weight  # [embed] float32, dt_bias
  into: Weight  # [embed, embed], Bᵀ
  out: Weight  # [embed, embed], Cᵀ


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
  """Iterations of every sequence, ``max(1, Poisson(config.loop.mean_depth))``, for ``forward``.

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


def run_core(
  params: Injection,
  x: Float[Array, "batch time embed"],
  sections: tuple[Section, ...],
  config: ModelConfig,
  rows: Rows,
  depths: Int[Array, "batch time"] | None,
  run: RunSection,
) -> tuple[Float[Array, "batch time embed"], list[BlockReport]]:
  """Prelude, the core as often as ``depths`` says, coda.

  What comes before the last iterations of a sequence (``config.loop.gradient_depth``) runs in a
  loop without a gradient, which ends with the deepest sequence of the batch; the others run in a
  scan. Each is compiled once. A sequence whose iterations are done is computed on, but keeps its
  state.

  Args:
    params: of the injection.
    x: embedded tokens.
    sections: prelude, core and coda.
    config: of the model.
    rows: of x.
    depths: iterations of the sequence that a token belongs to; None is ``fixed_depth`` for all.
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
  if depths is None:
    last = min(last, config.loop.fixed_depth)
    depths = jnp.full(rows.segment_ids.shape, config.loop.fixed_depth, jnp.int32)
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

  _, state = jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(early),
    without_gradient,
    (jnp.zeros((), jnp.int32), _start(config, rows.positions)),
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
  sections: tuple[DecodeSection, ...],
  config: ModelConfig,
  where: Appended | Stepped,
  run: RunDecodeSection,
) -> tuple[Float[Array, "*lead embed"], tuple[Any, ...], list[Array]]:
  """The same at ``fixed_depth`` over the entries of slots, see ``init_entries``.

  Args:
    params, config: see ``run_core``.
    x: [R, C, embed], or [S, embed] for a step.
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
  kept, drive = _drive(params, inputs, config)

  def iterate(i: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
    state, entries = carry
    # Iteration i of slot s is row s * depth + i of what the block takes for slots.
    here = appended._replace(rows=appended.rows * depth + i)
    section = core._replace(entries=entries)
    state, entries, _ = run(_inject(kept, drive, state), section, where=here)
    return state, entries

  flat = flattened(core.entries, depth)
  state = _start(config, appended.positions)
  state, flat = jax.lax.fori_loop(0, depth, iterate, (state, flat))
  within = unflattened(flat, depth)
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

  The others keep what their kind makes.
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
  return tuple(entries)


def _drive(params: Injection, x: Array, config: ModelConfig) -> tuple[Array, Array]:
  """Decay [embed] and what every iteration adds [..., embed], both float32."""
  kept, step = decay_and_step(params)
  inputs = rms_norm(x, params.norm, config.norm_eps)
  return kept, step * linear(inputs, params.into).astype(jnp.float32)


def _inject(kept: Array, drive: Array, state: Array) -> Array:
  return (kept * state.astype(jnp.float32) + drive).astype(state.dtype)


def _start(config: ModelConfig, positions: Array) -> Array:
  """State before the first iteration, [*positions.shape, embed]."""
  assert config.loop is not None
  shape = (*positions.shape, config.d_model)
  if config.loop.start == "zeros":
    return jnp.zeros(shape, config.dtype)
  key = jax.random.key(config.loop.start_seed, impl="threefry2x32")

  def draw(position: Array) -> Array:
    return jax.random.truncated_normal(
      jax.random.fold_in(key, position), -3.0, 3.0, (config.d_model,), jnp.float32
    )

  scale = config.init_scale * config.d_model**-0.5
  return (scale * jax.vmap(jax.vmap(draw))(positions)).astype(config.dtype)


LOOP = PassKind(
  field="loop",
  spec=injection_spec,
  forward=run_core,
  decode=decode_core,
  init_entries=init_entries,
  sample_depths=sample_depths,
)
