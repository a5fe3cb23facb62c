"""Causal depthwise convolution: signature, mathematics, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

import jax
import jax.numpy as jnp

from pallas_kernels import segments, sequence
from pallas_kernels.causal_conv1d import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.causal_conv1d.activation import Activation
from pallas_kernels.implementations import check_shape, choose

Array = jax.Array

IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
  "reference": reference.causal_conv1d,
  "xla": xla.causal_conv1d,
  "pallas_tpu": pallas_tpu.causal_conv1d,
  "pallas_gpu": pallas_gpu.causal_conv1d,
}


def causal_conv1d(
  x: Array,
  w: Array,
  bias: Array | None = None,
  *,
  activation: Activation | None = None,
  initial_tail: Array | None = None,
  segment_ids: Array | None = None,
  lengths: Array | None = None,
  time_axis: sequence.Axis | None = None,
  implementation: str | None = None,
) -> tuple[Array, Array]:
  """``y_t = act(bias + sum_{k<K} w[k] x_{t-K+1+k})`` a channel, and the tail to go on from.

  Sums are float32 (float64 if an input is). A call over T tokens equals calls over its pieces that
  hand on the tail. Padding reaches neither an output nor a gradient, whatever stands there. Reverse
  mode only.

  Args:
    x: [B, T, C], T >= 1, any float dtype.
    w: [K, C] filter, ``w[K-1]`` at the current token, K >= 2.
    bias: [C] or None.
    activation: "silu" (``z sigmoid(z)``) or None.
    initial_tail: [B, K-1, C] the inputs before the first token, oldest first; None is zeros. With
      ``segment_ids`` it belongs to the sequence that the row begins with.
    segment_ids: int [B, T], 0 at padding, else the id of the sequence the token belongs to; a
      sequence is contiguous in its row. Taps never reach across two sequences. None: each row is
      one sequence.
    lengths: int [B], tokens of each row that are not right padding, 0..T; 0 leaves the tail as it
      was. None: up to the last token with a segment id, or T.
    time_axis: inside ``jax.shard_map``, the mesh axis (or axes) that cuts time into runs of at
      least K-1 tokens; every shard but the first takes its tail from the one before it. Not
      together with ``lengths``.
    implementation: None (the fastest measured for this backend) or a key of ``IMPLEMENTATIONS``.

  Returns:
    y [B, T, C] in the dtype of x, 0 at padding, and the last K-1 inputs of the row's last sequence
    [B, K-1, C] in the dtype of x; with ``time_axis`` those of the shard.

  Raises:
    ValueError: shapes that do not fit, an unknown activation, ``lengths`` together with
      ``time_axis``, or an implementation that is not available or cannot do the shape.
  """
  run = choose("causal_conv1d", implementation, IMPLEMENTATIONS, default="xla")
  if x.ndim != 3 or 0 in x.shape:
    raise ValueError(f"causal_conv1d: x must be [B, T, C] without an empty axis, got {x.shape}.")
  batch, time, channels = x.shape
  if w.ndim != 2 or w.shape[0] < 2 or w.shape[1] != channels:
    raise ValueError(f"causal_conv1d: w must be [K >= 2, C={channels}], got {w.shape}.")
  kept = w.shape[0] - 1
  check_shape("causal_conv1d", "bias", bias, (channels,))
  if activation is not None and activation not in get_args(Activation):
    raise ValueError(
      f"causal_conv1d: activation={activation!r}; allowed: None, "
      f"{', '.join(repr(name) for name in get_args(Activation))}."
    )
  if initial_tail is None:
    initial_tail = jnp.zeros((batch, kept, channels), x.dtype)
  check_shape("causal_conv1d", "initial_tail", initial_tail, (batch, kept, channels))
  check_shape("causal_conv1d", "segment_ids", segment_ids, (batch, time))
  if lengths is not None:
    check_shape("causal_conv1d", "lengths", lengths, (batch,))
    if time_axis is not None:
      raise ValueError(
        f"causal_conv1d: lengths count the tokens of whole rows, which time_axis={time_axis!r} "
        "cuts; mark padding by segment_ids=0 instead."
      )

  initial_tail = initial_tail.astype(x.dtype)
  if time_axis is not None:
    incoming = sequence.incoming_tail(x, segment_ids, kept, time_axis)
    initial_tail = jnp.where(jax.lax.axis_index(time_axis) == 0, initial_tail, incoming)
  reach = _reach(*segments.cut(segment_ids, lengths, time), kept)
  dtype = jnp.result_type(jnp.float32, x, w)
  offset = jnp.zeros((channels,), dtype) if bias is None else bias.astype(dtype)
  arguments = sequence.vary_alike(x, w.astype(dtype), offset, initial_tail, reach)
  return run(*arguments, activation), _final_tail(x, initial_tail, reach)


def _reach(segment_ids: Array | None, real: Array | None, kept: int) -> Array | None:
  """How many inputs before its own a token sees, at most K-1; -1 at padding; None: K-1 everywhere.

  The inputs before the row are those of the sequence that it begins with.
  """
  if real is None:
    return None
  if segment_ids is None:
    return jnp.where(real, kept, -1)
  place = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  begins = segment_ids != jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
  start = jnp.where(begins.at[:, 0].set(False), place, -kept)
  reach = jnp.minimum(place - jax.lax.cummax(start, axis=1), kept)
  return jnp.where(real, reach, -1)


def _final_tail(x: Array, initial_tail: Array, reach: Array | None) -> Array:
  """The K-1 columns up to each row's last token, zeros where they are of an earlier sequence."""
  time, kept = x.shape[1], initial_tail.shape[1]
  if reach is None:
    return jnp.concatenate([initial_tail, x[:, max(time - kept, 0) :]], axis=1)[:, -kept:]
  end = jnp.max(jnp.where(reach >= 0, jnp.arange(1, time + 1), 0), axis=1, keepdims=True)
  place = end - kept + jnp.arange(kept)
  old = jnp.take_along_axis(initial_tail, jnp.clip(place + kept, 0, kept - 1)[..., None], axis=1)
  new = jnp.take_along_axis(x, jnp.maximum(place, 0)[..., None], axis=1)
  sees = jnp.take_along_axis(reach, jnp.maximum(end - 1, 0), axis=1)
  seen = (end == 0) | (end - 1 - place <= sees)
  return jnp.where(seen[..., None], jnp.where((place < 0)[..., None], old, new), 0.0)
