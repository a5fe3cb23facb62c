"""State space dual scan of Mamba-2: signature, mathematics, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import segments, sequence
from pallas_kernels.implementations import check_shape, choose
from pallas_kernels.ssd import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.steps import step_sizes

Array = jax.Array

# Finite: exp gives exactly 0, and the gradient of what is masked is 0 and not NaN.
_MASKED = -1e30

IMPLEMENTATIONS: Mapping[str, Callable[..., tuple[Array, Array]]] = {
  "reference": reference.ssd,
  "xla": xla.ssd,
  "pallas_tpu": pallas_tpu.ssd,
  "pallas_gpu": pallas_gpu.ssd,
}


def ssd(
  x: Array,
  dt: Array,
  a: Array,
  b: Array,
  c: Array,
  d: Array | None = None,
  *,
  initial_state: Array | None = None,
  segment_ids: Array | None = None,
  lengths: Array | None = None,
  dt_bias: Array | None = None,
  dt_softplus: bool = False,
  dt_limit: tuple[float, float | None] | None = None,
  time_axis: sequence.Axis | None = None,
  chunk_size: int = 64,
  implementation: str | None = None,
) -> tuple[Array, Array]:
  r"""Scans ``S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_tᵀ``, ``y_t = S_t c_t + d x_t`` over time.

  One matrix state [P, N] a head; head h reads b and c of group ``h // (H / G)``. State, decays and
  sums are float32 (float64 if an input is). A token with ``dt = 0`` leaves the state as it was, bit
  for bit. Every row of the batch is computed alike and apart from the others.

  Args:
    x: [B, T, H, P] inputs, T >= 1, any float dtype.
    dt: [B, T, H] step sizes >= 0, or what gives them by bias, softplus and limit.
    a: [H] decay rates, negative (``-exp(A_log)``).
    b: [B, T, G, N] input maps; G divides H.
    c: [B, T, G, N] output maps.
    d: [H] skip weights, or None for no skip.
    initial_state: [B, H, P, N] state before the first token; None is zeros. With ``segment_ids`` it
      belongs to the first segment of the row.
    segment_ids: int [B, T], 0 at padding, else the id of the sequence the token belongs to; a
      sequence is contiguous in its row. The state restarts at zero where a new one begins. None:
      each row is one sequence.
    lengths: int [B], tokens of each row that are not right padding. None: all T, or as the segment
      ids say. Padding of either kind does not touch the state, its output is 0, and what stands
      there, NaN included, reaches no result and no gradient.
    dt_bias: [H] added to dt, or None.
    dt_softplus: whether softplus follows.
    dt_limit: lower and upper bound (None: none) of the step size after that, or None.
    time_axis: inside ``jax.shard_map``, the mesh axis that cuts time: the arguments are one shard's
      tokens, and the state that the shards before leave is worked out and put in. Not together with
      ``initial_state`` or ``lengths``.
    chunk_size: tokens a chunk, the grid of the chunked implementations; T need not be a multiple.
    implementation: None (the fastest measured for this backend), or a key of ``IMPLEMENTATIONS``.

  Returns:
    y [B, T, H, P] in the dtype of x, and the state after the last token that is not padding,
    [B, H, P, N] float32 (of a shard: after its last token).

  Raises:
    ValueError: shapes that do not fit, or an implementation that is not available.

  References:
    Dao and Gu, 2405.21060, section 6 (the chunked form).
  """
  run = choose("ssd", implementation, IMPLEMENTATIONS, default="xla")
  if x.ndim != 4 or 0 in x.shape:
    raise ValueError(f"ssd: x must be [B, T, H, P] without an empty axis, got {x.shape}.")
  batch, time, heads, width = x.shape
  if b.ndim != 4 or b.shape[:2] != (batch, time) or heads % max(b.shape[2], 1):
    raise ValueError(
      f"ssd: b must be [B={batch}, T={time}, G, N] with G dividing H={heads}, got {b.shape}."
    )
  size = b.shape[3]
  if chunk_size < 1:
    raise ValueError(f"ssd: chunk_size={chunk_size}; allowed: at least 1.")
  check_shape("ssd", "dt", dt, (batch, time, heads))
  check_shape("ssd", "a", a, (heads,))
  check_shape("ssd", "c", c, b.shape)
  check_shape("ssd", "d", d, (heads,))
  check_shape("ssd", "dt_bias", dt_bias, (heads,))
  check_shape("ssd", "segment_ids", segment_ids, (batch, time))
  if time_axis is not None and (lengths is not None or initial_state is not None):
    raise ValueError(
      "ssd: time_axis goes with neither lengths nor initial_state; write padding as segment 0."
    )
  check_shape("ssd", "lengths", lengths, (batch,))

  dtype = jnp.result_type(jnp.float32, x, dt, a, b, c)
  a = a.astype(dtype)
  d = None if d is None else d.astype(dtype)
  check_shape("ssd", "initial_state", initial_state, (batch, heads, width, size))

  segment_ids, real = segments.cut(segment_ids, lengths, time)
  dt = step_sizes(dt.astype(dtype), bias=dt_bias, softplus=dt_softplus, limit=dt_limit, real=real)
  if real is not None:
    x, b, c = (jnp.where(real[..., None, None], v, 0) for v in (x, b, c))
  resets = None if segment_ids is None else segments.starts(segment_ids)
  if time_axis is not None:
    initial_state = _state_of_earlier_shards(x, dt, a, b, segment_ids, resets, time_axis)
  elif initial_state is None:
    initial_state = jnp.zeros((batch, heads, width, size), dtype)
  arguments = x, dt, a, b, c, d, initial_state.astype(dtype), resets
  y, state = run(*sequence.vary_alike(*arguments), chunk_size)
  return y.astype(x.dtype), state


def ssd_step(
  x: Array,
  dt: Array,
  a: Array,
  b: Array,
  c: Array,
  d: Array | None,
  state: Array,
  *,
  active: Array | None = None,
  dt_bias: Array | None = None,
  dt_softplus: bool = False,
  dt_limit: tuple[float, float | None] | None = None,
) -> tuple[Array, Array]:
  """One token of ``ssd`` for every row: the decoding step.

  One fused pass over the state, and in place where the caller's program donates it.

  Args:
    x: [B, H, P] inputs.
    dt: [B, H] step sizes >= 0, or what gives them by bias, softplus and limit.
    a, d: [H] decay rates (negative) and skip weights or None.
    b, c: [B, G, N] input and output maps.
    state: [B, H, P, N] float32.
    active: bool [B]; a row where it is False keeps its state bit for bit. None: all are.
    dt_bias, dt_softplus, dt_limit: see ``ssd``.

  Returns:
    y [B, H, P] in the dtype of x (of no meaning in a row that is not active), and the new state,
    in the dtype of ``state``.

  Raises:
    ValueError: shapes that do not fit.
  """
  if x.ndim != 3 or b.ndim != 3 or x.shape[1] % max(b.shape[1], 1):
    raise ValueError(
      "ssd_step: x must be [B, H, P] and b [B, G, N] with G dividing H, got "
      f"{x.shape} and {b.shape}."
    )
  check_shape("ssd_step", "dt", dt, x.shape[:2])
  check_shape("ssd_step", "a", a, x.shape[1:2])
  check_shape("ssd_step", "b", b, (x.shape[0], *b.shape[1:]))
  check_shape("ssd_step", "c", c, b.shape)
  check_shape("ssd_step", "d", d, x.shape[1:2])
  check_shape("ssd_step", "dt_bias", dt_bias, x.shape[1:2])
  check_shape("ssd_step", "active", active, x.shape[:1])
  check_shape("ssd_step", "state", state, (*x.shape, b.shape[2]))
  dt = step_sizes(
    dt.astype(state.dtype), bias=dt_bias, softplus=dt_softplus, limit=dt_limit, real=None
  )
  y, state = reference.step(x, dt, a, b, c, d, state, active)
  return y.astype(x.dtype), state


def _state_of_earlier_shards(
  x: Array,
  dt: Array,
  a: Array,
  b: Array,
  segment_ids: Array | None,
  resets: Array | None,
  axis: sequence.Axis,
) -> Array:
  """State before a shard's first token.

  From an empty state a shard makes ``sum_t exp(sum_{s>t} dt_s a) dt_t x_t b_tᵀ`` over its last
  sequence; of an incoming one it keeps ``exp(sum_t dt_t a)``, or 0 if a sequence begins inside.
  """
  batch, _, heads, width = x.shape
  groups, size = b.shape[2:]
  rate = dt * a
  later = jnp.flip(jnp.cumsum(jnp.flip(rate, 1), axis=1), 1)
  later = jnp.pad(later[:, 1:], ((0, 0), (0, 1), (0, 0)))
  total = jnp.sum(rate, axis=1)
  if resets is not None:
    runs = jnp.cumsum(resets, axis=1)
    later = jnp.where((runs == runs[:, -1:])[..., None], later, _MASKED)
    total = jnp.where((runs[:, -1] == 0)[:, None], total, _MASKED)
  inputs = (jnp.exp(later) * dt)[..., None] * x
  state = jnp.einsum(
    "btghp,btgn->bghpn",
    inputs.reshape(*dt.shape[:2], groups, heads // groups, width),
    b.astype(inputs.dtype),
    precision=None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
  ).reshape(batch, heads, width, size)
  goes_on = sequence.continues(segment_ids, batch, axis)
  return sequence.incoming_state(jnp.exp(total)[..., None, None], state, goes_on, axis)
