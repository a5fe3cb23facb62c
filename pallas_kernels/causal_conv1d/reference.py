"""Causal depthwise convolution one token at a time: the slow truth."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d.activation import Activation, activate

Array = jax.Array


def causal_conv1d(
  x: Array,
  w: Array,
  bias: Array,
  initial_tail: Array,
  reach: Array | None,
  activation: Activation | None,
) -> Array:
  """Slides a window of K columns, of which token t sees its own and the ``reach`` before it."""
  kept = initial_tail.shape[1]
  if reach is None:
    reach = jnp.full(x.shape[:2], kept)

  def body(tail: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
    column, reach = token
    window = jnp.concatenate([tail, column[:, None]], axis=1)
    seen = kept - jnp.arange(kept + 1) <= reach[:, None]
    z = jnp.sum(jnp.where(seen[..., None], window, 0.0) * w, axis=1) + bias
    return window[:, 1:], jnp.where(seen[:, -1:], activate(z, activation), 0.0)

  tokens = (jnp.moveaxis(x, 1, 0).astype(w.dtype), reach.T)
  _, y = jax.lax.scan(body, initial_tail.astype(w.dtype), tokens)
  return jnp.moveaxis(y, 0, 1).astype(x.dtype)
