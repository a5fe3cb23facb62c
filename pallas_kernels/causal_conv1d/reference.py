"""Causal depthwise convolution one token at a time: the slow truth."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def causal_conv1d(
  x: Array, w: Array, bias: Array, initial_tail: Array, resets: Array | None
) -> Array:
  """Slides a window of K columns; ``resets[b, t]`` empties the window before token t."""
  if resets is None:
    resets = jnp.zeros(x.shape[:2], bool)

  def body(tail: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
    column, reset = token
    tail = jnp.where(reset[:, None, None], 0.0, tail)
    window = jnp.concatenate([tail, column[:, None]], axis=1)
    return window[:, 1:], jnp.sum(window * w, axis=1) + bias

  _, y = jax.lax.scan(body, initial_tail, (jnp.moveaxis(x, 1, 0), resets.T))
  return jnp.moveaxis(y, 0, 1)
