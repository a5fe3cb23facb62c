"""State space dual scan of Mamba-2: signature, mathematics, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import segments
from pallas_kernels.implementations import choose
from pallas_kernels.ssd import reference, xla

Array = jax.Array

IMPLEMENTATIONS: Mapping[str, Callable[..., tuple[Array, Array]]] = {
  "reference": reference.ssd,
  "xla": xla.ssd,
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
  chunk_size: int = 128,
  implementation: str | None = None,
) -> tuple[Array, Array]:
  r"""Scans ``S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_tᵀ``, ``y_t = S_t c_t + d x_t`` over time.

  One matrix state [P, N] a head; head h reads b and c of group ``h // (H / G)``. State, decays and
  sums are float32 (float64 if an input is). A token with ``dt = 0`` leaves the state as it was, bit
  for bit, which is how right padding is written without segment ids. Every row of the batch is
  computed alike and apart from the others.

  Args:
    x: [B, T, H, P] inputs, T >= 1, any float dtype.
    dt: [B, T, H] step sizes >= 0, after softplus and bias; 0 at padding.
    a: [H] decay rates, negative (``-exp(A_log)``).
    b: [B, T, G, N] input maps; G divides H.
    c: [B, T, G, N] output maps.
    d: [H] skip weights, or None for no skip.
    initial_state: [B, H, P, N] state before the first token; None is zeros. With ``segment_ids`` it
      belongs to the first segment of the row.
    segment_ids: int [B, T], 0 at padding, else the id of the sequence the token belongs to; a
      sequence is contiguous in its row. The state restarts at zero where a new one begins. Padding
      does not touch the state and its output is 0. None: each row is one sequence.
    chunk_size: tokens a chunk, the grid of the chunked implementations; T need not be a multiple.
    implementation: None (the fastest measured for this backend), "reference" or "xla".

  Returns:
    y [B, T, H, P] in the dtype of x, and the state after the last token that is not padding,
    [B, H, P, N] float32.

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
  _check_shape("dt", dt, (batch, time, heads))
  _check_shape("a", a, (heads,))
  _check_shape("c", c, b.shape)
  if d is not None:
    _check_shape("d", d, (heads,))
  if segment_ids is not None:
    _check_shape("segment_ids", segment_ids, (batch, time))

  dtype = jnp.result_type(jnp.float32, x, dt, a, b, c)
  if initial_state is None:
    initial_state = jnp.zeros((batch, heads, width, size), dtype)
  _check_shape("initial_state", initial_state, (batch, heads, width, size))

  dt = dt.astype(dtype)
  resets = None
  if segment_ids is not None:
    real = segment_ids != 0
    dt = jnp.where(real[..., None], dt, 0.0)
    resets = segments.starts(segment_ids)
  d = None if d is None else d.astype(dtype)
  y, state = run(x, dt, a.astype(dtype), b, c, d, initial_state.astype(dtype), resets, chunk_size)
  if segment_ids is not None:
    y = jnp.where(real[..., None, None], y, 0.0)
  return y.astype(x.dtype), state


def ssd_step(
  x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array | None, state: Array
) -> tuple[Array, Array]:
  """One token of ``ssd`` for every row: the decoding step.

  Args:
    x: [B, H, P] inputs.
    dt: [B, H] step sizes >= 0; 0 leaves a row's state as it was.
    a, d: [H] decay rates (negative) and skip weights or None.
    b, c: [B, G, N] input and output maps.
    state: [B, H, P, N] float32.

  Returns:
    y [B, H, P] in the dtype of x, and the new state, in the dtype of ``state``.

  Raises:
    ValueError: shapes that do not fit.
  """
  if x.ndim != 3 or b.ndim != 3 or x.shape[1] % max(b.shape[1], 1):
    raise ValueError(
      "ssd_step: x must be [B, H, P] and b [B, G, N] with G dividing H, got "
      f"{x.shape} and {b.shape}."
    )
  _check_shape("dt", dt, x.shape[:2])
  _check_shape("a", a, x.shape[1:2])
  _check_shape("b", b, (x.shape[0], *b.shape[1:]))
  _check_shape("c", c, b.shape)
  if d is not None:
    _check_shape("d", d, x.shape[1:2])
  _check_shape("state", state, (*x.shape, b.shape[2]))
  y, state = reference.step(x, dt, a, b, c, d, state)
  return y.astype(x.dtype), state


def _check_shape(name: str, value: Array, expected: tuple[int, ...]) -> None:
  if value.shape != expected:
    raise ValueError(f"ssd: {name} must have shape {expected}, got {value.shape}.")
