"""Selective scan of Mamba-1: signature, mathematics, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import segments, sequence
from pallas_kernels.implementations import check_shape, choose
from pallas_kernels.selective_scan import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.steps import step_sizes

Array = jax.Array

IMPLEMENTATIONS: Mapping[str, Callable[..., tuple[Array, Array]]] = {
  "reference": reference.selective_scan,
  "xla": xla.selective_scan,
  "pallas_tpu": pallas_tpu.selective_scan,
  "pallas_gpu": pallas_gpu.selective_scan,
}


def selective_scan(
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
  r"""Scans ``h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t``, ``y_t = sum_n c_tn h_tn + d x_t``.

  One state of N entries a channel, each with a decay rate of its own; channel i reads b and c of
  group ``i // (D / G)``. State, decays and sums are float32 (float64 if an input is, with
  "reference" and "xla"). A token with ``dt = 0`` leaves the state as it was, bit for bit. Every row
  of the batch is computed alike and apart from the others.

  Args:
    x: [B, T, D] inputs, T >= 1, any float dtype.
    dt: [B, T, D] step sizes >= 0, or what gives them by bias, softplus and limit.
    a: [D, N] decay rates, negative (``-exp(A_log)``).
    b: [B, T, G, N] input maps; G divides D.
    c: [B, T, G, N] output maps.
    d: [D] skip weights, or None for no skip.
    initial_state: [B, D, N] state before the first token; None is zeros. With ``segment_ids`` it
      belongs to the first segment of the row.
    segment_ids: int [B, T], 0 at padding, else the id of the sequence the token belongs to; a
      sequence is contiguous in its row. The state restarts at zero where a new one begins. None:
      each row is one sequence.
    lengths: int [B], tokens of each row that are not right padding. None: all T, or as the segment
      ids say. Padding of either kind does not touch the state, its output is 0, and what stands
      there, NaN included, reaches no result and no gradient.
    dt_bias: [D] added to dt, or None.
    dt_softplus: whether softplus follows.
    dt_limit: lower and upper bound (None: none) of the step size after that, or None.
    time_axis: inside ``jax.shard_map``, the mesh axis that cuts time: the arguments are one shard's
      tokens, and the state that the shards before leave is worked out by a first scan and put in.
      Not together with ``initial_state`` or ``lengths``. The Pallas implementations ask for
      ``check_vma=False`` there.
    chunk_size: tokens a chunk, the distance of the states stored for the gradient; T need not be a
      multiple.
    implementation: None (the fastest measured for this backend), or a key of ``IMPLEMENTATIONS``.

  Returns:
    y [B, T, D] in the dtype of x, and the state after the last token that is not padding, [B, D, N]
    float32 (of a shard: after its last token).

  Raises:
    ValueError: shapes that do not fit, or an implementation that is not available.

  References:
    Gu and Dao, 2312.00752, section 3 and algorithm 2.
  """
  run = choose("selective_scan", implementation, IMPLEMENTATIONS, default="xla")
  if x.ndim != 3 or 0 in x.shape:
    raise ValueError(f"selective_scan: x must be [B, T, D] without an empty axis, got {x.shape}.")
  batch, time, channels = x.shape
  if b.ndim != 4 or b.shape[:2] != (batch, time) or channels % max(b.shape[2], 1):
    raise ValueError(
      f"selective_scan: b must be [B={batch}, T={time}, G, N] with G dividing D={channels}, got "
      f"{b.shape}."
    )
  size = b.shape[3]
  if chunk_size < 1:
    raise ValueError(f"selective_scan: chunk_size={chunk_size}; allowed: at least 1.")
  check_shape("selective_scan", "dt", dt, x.shape)
  check_shape("selective_scan", "a", a, (channels, size))
  check_shape("selective_scan", "c", c, b.shape)
  check_shape("selective_scan", "d", d, (channels,))
  check_shape("selective_scan", "dt_bias", dt_bias, (channels,))
  check_shape("selective_scan", "segment_ids", segment_ids, (batch, time))
  if time_axis is not None and (lengths is not None or initial_state is not None):
    raise ValueError(
      "selective_scan: time_axis goes with neither lengths nor initial_state; write padding as "
      "segment 0."
    )
  check_shape("selective_scan", "lengths", lengths, (batch,))
  check_shape("selective_scan", "initial_state", initial_state, (batch, channels, size))

  dtype = jnp.result_type(jnp.float32, x, dt, a, b, c)
  a = a.astype(dtype)
  d = None if d is None else d.astype(dtype)
  segment_ids, real = segments.cut(segment_ids, lengths, time)
  dt = step_sizes(dt.astype(dtype), bias=dt_bias, softplus=dt_softplus, limit=dt_limit, real=real)
  if real is not None:
    x = jnp.where(real[..., None], x, 0)
    b, c = (jnp.where(real[..., None, None], v, 0) for v in (b, c))
  resets = None if segment_ids is None else segments.starts(segment_ids)
  if initial_state is None:
    initial_state = jnp.zeros((batch, channels, size), dtype)
  initial_state = initial_state.astype(dtype)
  alike = sequence.vary_alike
  if time_axis is not None:
    _, alone = run(*alike(x, dt, a, b, c, None, initial_state, resets), chunk_size)
    decay = jnp.exp(jnp.sum(dt, axis=1)[..., None] * a)
    if resets is not None:
      decay = jnp.where(jnp.any(resets, axis=1)[:, None, None], 0.0, decay)
    goes_on = sequence.continues(segment_ids, batch, time_axis)
    initial_state = sequence.incoming_state(decay, alone, goes_on, time_axis)
  y, state = run(*alike(x, dt, a, b, c, d, initial_state, resets), chunk_size)
  return y.astype(x.dtype), state


def selective_scan_step(
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
  """One token of ``selective_scan`` for every row: the decoding step.

  One fused pass over the state, and in place where the caller's program donates it.

  Args:
    x: [B, D] inputs.
    dt: [B, D] step sizes >= 0, or what gives them by bias, softplus and limit.
    a: [D, N] decay rates, negative. d: [D] skip weights or None.
    b, c: [B, G, N] input and output maps; G divides D.
    state: [B, D, N] float32.
    active: bool [B]; a row where it is False keeps its state bit for bit. None: all are.
    dt_bias, dt_softplus, dt_limit: see ``selective_scan``.

  Returns:
    y [B, D] in the dtype of x (of no meaning in a row that is not active), and the new state, in
    the dtype of ``state``.

  Raises:
    ValueError: shapes that do not fit.
  """
  if x.ndim != 2 or b.ndim != 3 or x.shape[1] % max(b.shape[1], 1):
    raise ValueError(
      "selective_scan_step: x must be [B, D] and b [B, G, N] with G dividing D, got "
      f"{x.shape} and {b.shape}."
    )
  channels, size = x.shape[1], b.shape[2]
  check_shape("selective_scan_step", "dt", dt, x.shape)
  check_shape("selective_scan_step", "a", a, (channels, size))
  check_shape("selective_scan_step", "b", b, (x.shape[0], *b.shape[1:]))
  check_shape("selective_scan_step", "c", c, b.shape)
  check_shape("selective_scan_step", "d", d, (channels,))
  check_shape("selective_scan_step", "dt_bias", dt_bias, (channels,))
  check_shape("selective_scan_step", "active", active, x.shape[:1])
  check_shape("selective_scan_step", "state", state, (*x.shape, size))
  dt = step_sizes(
    dt.astype(state.dtype), bias=dt_bias, softplus=dt_softplus, limit=dt_limit, real=None
  )
  y, state = reference.step(x, dt, a, b, c, d, state, active)
  return y.astype(x.dtype), state
