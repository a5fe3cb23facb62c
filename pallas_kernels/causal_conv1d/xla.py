"""Causal depthwise convolution as K shifted multiply-adds, which XLA fuses into one pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def causal_conv1d(
  x: Array, w: Array, bias: Array, initial_tail: Array, resets: Array | None
) -> Array:
  """``sum_k w[k] x_{t-K+1+k} + bias``; taps that reach across a reset are dropped."""
  time, taps = x.shape[1], w.shape[0]
  columns = jnp.concatenate([initial_tail, x], axis=1)
  if resets is not None:
    place = jnp.arange(time)
    # The first token whose taps may reach back to the incoming tail is at 1 - K.
    start = jax.lax.cummax(jnp.where(resets, place, 1 - taps), axis=1)
  y = jnp.broadcast_to(bias, x.shape)
  for k in range(taps):
    tap = columns[:, k : k + time]
    if resets is not None and k < taps - 1:
      tap = jnp.where((place - (taps - 1 - k) >= start)[..., None], tap, 0.0)
    y = y + w[k] * tap
  return y
