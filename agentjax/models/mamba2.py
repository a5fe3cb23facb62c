"""Mamba-2 block with separate projections, so that heads can be sharded."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.linear import linear
from agentjax.models.matrices import matrix_spec
from agentjax.models.norm import gated_rms_norm
from agentjax.models.spec import ParamSpec, Weight
from agentjax.sharding import LOGICAL_AXES, index, on_shards, ways
from pallas_kernels.causal_conv1d.api import causal_conv1d
from pallas_kernels.kv_packet import compose_states
from pallas_kernels.ssd.api import ssd, ssd_step
from pallas_kernels.steps import step_sizes

Array = jax.Array


@flax.struct.dataclass
class Mamba2:
  """Weights. The projections and the convolution over x, B and C are kept apart."""

  gate: Weight  # z: [embed, heads, width]
  x: Weight  # [embed, heads, width]
  b: Weight  # [embed, groups, state]
  c: Weight  # [embed, groups, state]
  step: Weight  # dt: [embed, heads]
  conv_x: Weight  # [kernel, heads, width]
  conv_b: Weight  # [kernel, groups, state]
  conv_c: Weight  # [kernel, groups, state]
  conv_x_bias: Weight  # [heads, width]
  conv_b_bias: Weight  # [groups, state]
  conv_c_bias: Weight  # [groups, state]
  step_bias: Weight  # dt_bias: [heads] float32
  decay_rate: Weight  # A_log: [heads] float32
  skip: Weight  # D: [heads] float32
  norm: Weight  # [heads, width]
  out: Weight  # [heads, width, embed]


@flax.struct.dataclass
class Opening:
  """What has to be known of a run of tokens to say what it makes of any state before it.

  The run turns S into ``exp(total log decay) S + C``. C depends on what is before through the first
  taps of the convolution alone, so the first ``kernel - 1`` tokens are kept to be run again.

  Attributes:
    columns: [slots, kernel - 1, channels], inputs x | B | C of the convolution at these tokens.
    steps: float32 [slots, kernel - 1, heads], of these tokens, before bias and softplus.
    log_decay: float32 [slots, heads], the sum of ``dt A`` over the tokens behind them.
    count: int32 [slots], tokens of the run.
  """

  columns: Array
  steps: Array
  log_decay: Array
  count: Array


@flax.struct.dataclass
class MambaCache:
  """What a slot keeps of its past."""

  tail: Array  # [slots, kernel - 1, heads * width + 2 * groups * state] last inputs x | B | C
  state: Array  # [slots, heads, width, state] float32
  opening: Opening | None = None  # noted by ``mamba2_extend`` only, where there is one


class Projected(NamedTuple):
  """What the projections make of a token."""

  gate: Array  # [..., heads * width]
  x: Array  # [..., heads * width], before the convolution
  b: Array  # [..., groups * state], before the convolution
  c: Array  # [..., groups * state], before the convolution
  step: Array  # [..., heads] float32, before bias and softplus


class _Mixing(NamedTuple):
  """The weights between the projections; fields of ``Mamba2``, or parts of them."""

  conv_x: Array
  conv_b: Array
  conv_c: Array
  conv_x_bias: Array
  conv_b_bias: Array
  conv_c_bias: Array
  step_bias: Array
  decay_rate: Array
  skip: Array


def mamba2_spec(config: ModelConfig) -> Mamba2:
  """Abstract parameters of one Mamba-2 block."""
  heads = (config.mamba_heads, config.mamba_head_dim)
  groups = (config.mamba_groups, config.mamba_state)
  head_axes, group_axes = ("mamba_heads", "mamba_head_dim"), ("mamba_groups", "mamba_state")
  dtype, tap = config.param_dtype, config.conv_kernel**-0.5

  def projection(shape: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
    return matrix_spec(config, (config.d_model, *shape), ("embed", *axes))

  def taps(shape: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
    return ParamSpec((config.conv_kernel, *shape), (None, *axes), dtype, scale=tap, decayed=False)

  def bias(shape: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
    return ParamSpec(shape, axes, dtype, "zeros", decayed=False)

  return Mamba2(
    gate=projection(heads, head_axes),
    x=projection(heads, head_axes),
    b=projection(groups, group_axes),
    c=projection(groups, group_axes),
    step=projection(heads[:1], head_axes[:1]),
    conv_x=taps(heads, head_axes),
    conv_b=taps(groups, group_axes),
    conv_c=taps(groups, group_axes),
    conv_x_bias=bias(heads, head_axes),
    conv_b_bias=bias(groups, group_axes),
    conv_c_bias=bias(groups, group_axes),
    step_bias=ParamSpec(
      heads[:1],
      head_axes[:1],
      init="step_bias",
      low=config.dt_min,
      high=config.dt_max,
      floor=config.dt_floor,
      decayed=False,
      wide=True,
    ),
    decay_rate=ParamSpec(heads[:1], head_axes[:1], init="decay_rate", decayed=False, wide=True),
    skip=ParamSpec(heads[:1], head_axes[:1], init="ones", decayed=False, wide=True),
    norm=ParamSpec(heads, head_axes, dtype, "ones", decayed=False, wide=True),
    out=matrix_spec(config, (*heads, config.d_model), (*head_axes, "embed")),
  )


def init_mamba_cache(config: ModelConfig, slots: int) -> MambaCache:
  """Zeros: the tail in the compute dtype, the state in float32."""
  inner = config.mamba_heads * config.mamba_head_dim
  channels = inner + 2 * config.mamba_groups * config.mamba_state
  return MambaCache(
    tail=jnp.zeros((slots, config.conv_kernel - 1, channels), config.dtype),
    state=jnp.zeros(
      (slots, config.mamba_heads, config.mamba_head_dim, config.mamba_state), jnp.float32
    ),
  )


def with_opening(cache: MambaCache) -> MambaCache:
  """Empty slots that note what ``join_states`` needs."""
  heads = cache.state.shape[:2]
  return MambaCache(
    tail=cache.tail,
    state=cache.state,
    opening=Opening(
      columns=jnp.zeros_like(cache.tail),
      steps=jnp.zeros((heads[0], cache.tail.shape[1], heads[1]), jnp.float32),
      log_decay=jnp.zeros(heads, jnp.float32),
      count=jnp.zeros(heads[:1], jnp.int32),
    ),
  )


def mamba2(
  params: Mamba2,
  x: Float[Array, "batch time embed"],
  config: ModelConfig,
  *,
  segment_ids: Int[Array, "batch time"],
) -> Float[Array, "batch time embed"]:
  """Convolution, state space scan, gated norm; state and taps restart with every segment.

  ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_tᵀ``, ``y_t = S_t C_t + D x_t`` with x, B, C after a
  causal convolution and SiLU, ``dt = softplus(step + bias)``, ``A = -exp(A_log)``; the output is
  ``out norm(y silu(z))``. Padding (segment 0) reaches neither taps nor state.

  References: Dao and Gu, 2405.21060; Nemotron-H, 2504.03624.
  """
  projected = project_in(params, x)
  specs = mamba2_spec(config)
  rows = ("batch", "time")
  arguments = [(segment_ids, rows)]
  arguments += [
    (v.reshape(*v.shape[:2], *spec.shape[1:]), (*rows, *spec.axes[1:]))
    for v, spec in (
      (projected.x, specs.x),
      (projected.b, specs.b),
      (projected.c, specs.c),
      (projected.step, specs.step),
    )
  ]
  arguments += [(getattr(params, name), getattr(specs, name).axes) for name in _Mixing._fields]
  y = on_shards(
    functools.partial(_mix, config=config),
    arguments,
    (*rows, "mamba_heads", "mamba_head_dim"),
    name="the Mamba-2 scan",
  )
  return mix_out(params, y, projected.gate, config)


def mamba2_extend(
  params: Mamba2,
  x: Float[Array, "rows time embed"],
  cache: MambaCache,
  config: ModelConfig,
  *,
  rows: Int[Array, " rows"],
  counts: Int[Array, " rows"],
) -> tuple[Float[Array, "rows time embed"], MambaCache]:
  """Appends ``counts[r]`` tokens to slot ``rows[r]``; right padding changes nothing.

  ``rows[r]`` is the number of slots for a row that is not used.
  """
  projected = project_in(params, x)
  tail, state = (v.at[rows].get(mode="clip") for v in (cache.tail, cache.state))
  flat = projected[1:4]
  y, tail, state = _run(params, flat, projected.step, tail, state, counts, config)
  opening = cache.opening
  if opening is not None:
    opening = _noted(params, opening, projected, config, rows, counts)
  cache = MambaCache(
    tail=cache.tail.at[rows].set(tail, mode="drop"),
    state=cache.state.at[rows].set(state, mode="drop"),
    opening=opening,
  )
  return mix_out(params, y, projected.gate, config), cache


def join_states(params: Mamba2, entries: Sequence[MambaCache], config: ModelConfig) -> MambaCache:
  """What slots hold after runs of tokens one after the other, each noted in a slot of its own.

  ``S = exp(l) S + C`` run by run. The convolution of a run's first tokens sees the last columns of
  the run before; they are run again, and what that changes is added to C, decayed by the rest of
  the run. So the state is that of one run of all these columns and steps, up to rounding, and of a
  single run its own, bit for bit.

  Args:
    params: of the block.
    entries: [slots, ...] each; at least one token a run. All but the first have openings, and the
      first may be of any slots that hold something.
    config: of the params.
  """
  first, *rest = entries
  if not rest:
    return MambaCache(tail=first.tail, state=first.state)
  tails = [first.tail]
  for entry in rest:
    tails.append(_tail_behind(tails[-1], entry))
  openings = jax.tree.map(lambda *v: jnp.concatenate(v), *(entry.opening for entry in rest))
  # All of them at once, behind what is before them and behind nothing.
  twice = jax.tree.map(lambda v: jnp.concatenate([v, v]), openings)
  before = jnp.concatenate(tails[:-1])
  both, sums = _run_opening(
    params, twice, jnp.concatenate([before, jnp.zeros_like(before)]), config
  )
  behind, alone = jnp.split(both, 2)
  changes = jnp.exp(openings.log_decay)[..., None, None] * (behind - alone)
  states = [first.state]
  for entry, change in zip(rest, jnp.split(changes, len(rest)), strict=True):
    states.append(entry.state + change)
  decays = jnp.split(jnp.split(sums, 2)[0] + openings.log_decay, len(rest))
  log_decays = [jnp.zeros_like(decays[0]), *decays]  # nothing stands before the first
  state = compose_states(jnp.stack(log_decays, axis=1), jnp.stack(states, axis=1))
  return MambaCache(tail=tails[-1], state=state)


def _tail_behind(tail: Array, entry: MambaCache) -> Array:
  """The last columns after a run that came behind ``tail``; a short one leaves some of these."""
  opening, kept = entry.opening, tail.shape[1]
  assert opening is not None, "see ``with_opening``"
  count = jnp.minimum(opening.count, kept)[:, None, None]
  columns = jnp.concatenate([tail, opening.columns], axis=1)
  last = jnp.take_along_axis(columns, count + jnp.arange(kept)[:, None], axis=1)
  return jnp.where(count < kept, last, entry.tail)


def mamba2_step(
  params: Mamba2,
  x: Float[Array, "slots embed"],
  cache: MambaCache,
  config: ModelConfig,
  *,
  active: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots embed"], MambaCache]:
  """One token for every active slot; the others keep tail and state bit for bit."""
  projected = project_in(params, x)
  y, cache = advance_state(params, projected, cache, config, active=active)
  return mix_out(params, y, projected.gate, config), cache


def advance_state(
  params: Mamba2,
  projected: Projected,
  cache: MambaCache,
  config: ModelConfig,
  *,
  active: Bool[Array, " slots"],
) -> tuple[Float[Array, "slots heads width"], MambaCache]:
  """Convolution and recurrence of one step, between the projections of ``mamba2_step``."""
  column = jnp.concatenate(projected[1:4], axis=-1)
  window = jnp.concatenate([cache.tail, column[:, None]], axis=1)
  filters = _filters(params, jnp.float32)
  taps = jnp.concatenate([w for w, _ in filters], axis=-1)
  bias = jnp.concatenate([v for _, v in filters], axis=-1)
  convolved = jnp.sum(window.astype(jnp.float32) * taps, axis=1) + bias
  activated = jax.nn.silu(convolved.astype(column.dtype))
  inputs, b, c = _by_head(params, *_split(activated, projected[1:4]))
  y, state = ssd_step(
    inputs,
    projected.step,
    _decay(params),
    b,
    c,
    params.skip,
    cache.state,
    active=active,
    **_steps(params, config),
  )
  tail = jnp.where(active[:, None, None], window[:, 1:], cache.tail)
  return y, MambaCache(tail=tail, state=state)


def project_in(params: Mamba2, x: Array) -> Projected:
  """The projections into the block."""
  return Projected(
    gate=linear(x, params.gate),
    x=linear(x, params.x),
    b=linear(x, params.b),
    c=linear(x, params.c),
    step=linear(x, params.step).astype(jnp.float32),
  )


def _run(
  params: Mamba2,
  columns: Sequence[Array],
  steps: Array,
  tail: Array,
  state: Array,
  counts: Array,
  config: ModelConfig,
) -> tuple[Array, Array, Array]:
  """Convolution and scan of ``counts`` tokens of every row: y, and the new tail and state.

  Args:
    params: of the block.
    columns: x, b and c [rows, time, channels] before the convolution.
    steps: [rows, time, heads] before bias and softplus.
    tail, state: of the rows before the tokens.
    counts: tokens of each row that are not right padding.
    config: of the params.
  """
  tails = _split(tail, columns)
  convolved, new_tails = zip(
    *(
      causal_conv1d(
        v,
        w,
        bias,
        initial_tail=before,
        lengths=counts,
        activation="silu",
        implementation=config.kernels,
      )
      for v, (w, bias), before in zip(columns, _filters(params, tail.dtype), tails, strict=True)
    ),
    strict=True,
  )
  inputs, b, c = _by_head(params, *convolved)
  y, state = ssd(
    inputs,
    steps,
    _decay(params),
    b,
    c,
    params.skip,
    initial_state=state,
    lengths=counts,
    **_steps(params, config),
    chunk_size=config.chunk_size,
    implementation=config.kernels,
  )
  return y, jnp.concatenate(new_tails, axis=-1), state


def _noted(
  params: Mamba2,
  opening: Opening,
  projected: Projected,
  config: ModelConfig,
  rows: Array,
  counts: Array,
) -> Opening:
  """The opening with ``counts`` more tokens of slots ``rows``."""
  time, kept = projected.step.shape[1], opening.columns.shape[1]
  token = jnp.arange(time)
  at = opening.count.at[rows].get(mode="clip")[:, None] + token
  real = token < counts[:, None]
  place = jnp.where(real, at, kept)  # past the end it is dropped

  def put(held: Array, new: Array) -> Array:
    return held.at[rows[:, None], place].set(new.astype(held.dtype), mode="drop")

  rates = _rates(params, projected.step, real & (at >= kept), config)
  return Opening(
    columns=put(opening.columns, jnp.concatenate(projected[1:4], axis=-1)),
    steps=put(opening.steps, projected.step),
    log_decay=opening.log_decay.at[rows].add(jnp.sum(rates, axis=1), mode="drop"),
    count=opening.count.at[rows].add(counts, mode="drop"),
  )


def _run_opening(
  params: Mamba2, opening: Opening, tail: Array, config: ModelConfig
) -> tuple[Array, Array]:
  """The tokens of an opening behind ``tail`` from an empty state: state and log decay."""
  kept = opening.columns.shape[1]
  counts = jnp.minimum(opening.count, kept)
  inner, group = config.mamba_heads * config.mamba_head_dim, config.mamba_groups
  columns = jnp.split(opening.columns, [inner, inner + group * config.mamba_state], axis=-1)
  empty = jnp.zeros(
    (len(tail), config.mamba_heads, config.mamba_head_dim, config.mamba_state), jnp.float32
  )
  _, _, state = _run(params, columns, opening.steps, tail, empty, counts, config)
  real = jnp.arange(kept) < counts[:, None]
  return state, jnp.sum(_rates(params, opening.steps, real, config), axis=1)


def _rates(params: Mamba2, steps: Array, real: Array, config: ModelConfig) -> Array:
  """``dt A`` [rows, time, heads], 0 at tokens that are not real."""
  limit = config.dt_limit_low, config.dt_limit_high
  dt = step_sizes(steps, bias=params.step_bias, softplus=True, limit=limit, real=real)
  return dt * _decay(params)


def _mix(
  segment_ids: Array,
  x: Array,
  b: Array,
  c: Array,
  step: Array,
  *weights: Array,
  config: ModelConfig,
) -> Array:
  """Convolution and scan of one device's heads and tokens.

  Args:
    segment_ids: [B, T].
    x: [B, T, heads, width], the device's heads.
    b, c: [B, T, groups, state], all groups: those of its heads are picked out.
    step: [B, T, heads].
    weights: the fields of ``_Mixing``, for its heads and all groups.

  Returns:
    y [B, T, heads, width].
  """
  params = _Mixing(*weights)
  if ways("mamba_heads") > 1:
    # One group for as many neighbouring heads as surely share it.
    heads, sharing = x.shape[2], config.mamba_heads // config.mamba_groups
    together = math.gcd(heads, sharing)
    mine = (index("mamba_heads") * heads + jnp.arange(0, heads, together)) // sharing
    b, c = (jnp.take(v, mine, axis=2) for v in (b, c))
    names = ("conv_b", "conv_c", "conv_b_bias", "conv_c_bias")
    params = params._replace(
      **{name: jnp.take(getattr(params, name), mine, axis=-2) for name in names}
    )
  time_axis = LOGICAL_AXES["time"] if ways("time") > 1 else None
  convolved = []
  for v, (w, bias) in zip((x, b, c), _filters(params, x.dtype), strict=True):
    out, _ = causal_conv1d(
      v.reshape(*v.shape[:2], -1),
      w,
      bias,
      segment_ids=segment_ids,
      activation="silu",
      time_axis=time_axis,
      implementation=config.kernels,
    )
    convolved.append(out.reshape(v.shape))
  x, b, c = convolved
  y, _ = ssd(
    x,
    step,
    _decay(params),
    b,
    c,
    params.skip,
    segment_ids=segment_ids,
    **_steps(params, config),
    time_axis=time_axis,
    chunk_size=config.chunk_size,
    implementation=config.kernels,
  )
  return y


def _filters(params: Mamba2 | _Mixing, dtype: jnp.dtype) -> list[tuple[Array, Array]]:
  """Taps [kernel, channels] and bias [channels] of x, B and C."""
  pairs = (
    (params.conv_x, params.conv_x_bias),
    (params.conv_b, params.conv_b_bias),
    (params.conv_c, params.conv_c_bias),
  )
  return [(w.reshape(w.shape[0], -1).astype(dtype), v.reshape(-1).astype(dtype)) for w, v in pairs]


def _by_head(params: Mamba2, x: Array, b: Array, c: Array) -> tuple[Array, Array, Array]:
  """Heads and groups on axes of their own."""
  lead = x.shape[:-1]
  return (
    x.reshape(*lead, *params.x.shape[1:]),
    b.reshape(*lead, *params.b.shape[1:]),
    c.reshape(*lead, *params.c.shape[1:]),
  )


class _Steps(TypedDict):
  dt_bias: Array
  dt_softplus: bool
  dt_limit: tuple[float, float | None]


def _steps(params: Mamba2 | _Mixing, config: ModelConfig) -> _Steps:
  """How step sizes come from the projection."""
  return {
    "dt_bias": params.step_bias,
    "dt_softplus": True,
    "dt_limit": (config.dt_limit_low, config.dt_limit_high),
  }


def _decay(params: Mamba2 | _Mixing) -> Array:
  return -jnp.exp(params.decay_rate)


def mix_out(params: Mamba2, y: Array, gate: Array, config: ModelConfig) -> Array:
  """Gate, norm and the projection out of the block."""
  flat = gated_rms_norm(
    y.reshape(gate.shape), gate, params.norm.reshape(-1), config.mamba_groups, config.norm_eps
  )
  return linear(flat, params.out)


def _split(x: Array, like: Sequence[Array]) -> list[Array]:
  """Cuts the last axis into runs as wide as the arrays of ``like``."""
  ends = list(itertools.accumulate(v.shape[-1] for v in like[:-1]))
  return jnp.split(x, ends, axis=-1)
