"""Causal depthwise convolution: signature, mathematics, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import segments
from pallas_kernels.causal_conv1d import reference, xla
from pallas_kernels.implementations import choose

Array = jax.Array

IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
  "reference": reference.causal_conv1d,
  "xla": xla.causal_conv1d,
}


def causal_conv1d(
  x: Array,
  w: Array,
  bias: Array | None = None,
  *,
  initial_tail: Array | None = None,
  segment_ids: Array | None = None,
  lengths: Array | None = None,
  implementation: str | None = None,
) -> tuple[Array, Array]:
  """``y_t = bias + sum_{k<K} w[k] x_{t-K+1+k}`` channel by channel, and the tail to go on from.

  No activation is applied. Sums are float32 (float64 if an input is). A call over T tokens equals
  calls over its pieces that hand on the tail.

  Args:
    x: [B, T, C], T >= 1, any float dtype.
    w: [K, C] filter, ``w[K-1]`` at the current token, K >= 2.
    bias: [C] or None.
    initial_tail: [B, K-1, C] the inputs before the first token, oldest first; None is zeros. With
      ``segment_ids`` it belongs to the first segment of the row.
    segment_ids: int [B, T], 0 at padding, else the id of the sequence the token belongs to; a
      sequence is contiguous in its row. Taps never reach across two sequences. None: each row is
      one sequence.
    lengths: int [B], tokens of each row that are not right padding, 0..T; 0 leaves the tail as it
      was. None: up to the last token with a segment id, or T.
    implementation: None (the fastest measured for this backend), "reference" or "xla".

  Returns:
    y [B, T, C] in the dtype of x, 0 at padding, and the last K-1 inputs of the row's last sequence
    [B, K-1, C] in the dtype of x.

  Raises:
    ValueError: shapes that do not fit, or an implementation that is not available.
  """
  run = choose("causal_conv1d", implementation, IMPLEMENTATIONS, default="xla")
  if x.ndim != 3 or 0 in x.shape:
    raise ValueError(f"causal_conv1d: x must be [B, T, C] without an empty axis, got {x.shape}.")
  batch, time, channels = x.shape
  if w.ndim != 2 or w.shape[0] < 2 or w.shape[1] != channels:
    raise ValueError(f"causal_conv1d: w must be [K >= 2, C={channels}], got {w.shape}.")
  kept = w.shape[0] - 1
  if bias is not None:
    _check_shape("bias", bias, (channels,))
  if initial_tail is None:
    initial_tail = jnp.zeros((batch, kept, channels), x.dtype)
  _check_shape("initial_tail", initial_tail, (batch, kept, channels))
  if segment_ids is not None:
    _check_shape("segment_ids", segment_ids, (batch, time))
  if lengths is not None:
    _check_shape("lengths", lengths, (batch,))

  initial_tail = initial_tail.astype(x.dtype)
  real, resets = None, None
  place = jnp.arange(time)
  if segment_ids is not None:
    if lengths is None:
      lengths = segments.lengths(segment_ids)
    else:
      segment_ids = jnp.where(place < lengths[:, None], segment_ids, 0)
    real = segment_ids != 0
    resets = segments.starts(segment_ids)
  elif lengths is not None:
    real = place < lengths[:, None]
  if real is not None:
    x = jnp.where(real[..., None], x, 0)  # padding before a row's first sequence is in its taps

  dtype = jnp.result_type(jnp.float32, x, w)
  offset = jnp.zeros((channels,), dtype) if bias is None else bias.astype(dtype)
  y = run(x.astype(dtype), w.astype(dtype), offset, initial_tail.astype(dtype), resets)
  if real is not None:
    y = jnp.where(real[..., None], y, 0.0)
  return y.astype(x.dtype), _final_tail(x, initial_tail, resets, lengths)


def _final_tail(
  x: Array, initial_tail: Array, resets: Array | None, lengths: Array | None
) -> Array:
  """The last K-1 columns before each row's end, zeros where they are of an earlier sequence."""
  time, kept = x.shape[1], initial_tail.shape[1]
  columns = jnp.concatenate([initial_tail, x], axis=1)
  if lengths is None:
    return columns[:, time:]
  place = lengths[:, None] + jnp.arange(kept)
  tail = jnp.take_along_axis(columns, place[..., None], axis=1)
  if resets is None:
    return tail
  start = jnp.max(jnp.where(resets, jnp.arange(time), -kept), axis=1, keepdims=True)
  return jnp.where((place - kept >= start)[..., None], tail, 0.0)


def _check_shape(name: str, value: Array, expected: tuple[int, ...]) -> None:
  if value.shape != expected:
    raise ValueError(f"causal_conv1d: {name} must have shape {expected}, got {value.shape}.")
