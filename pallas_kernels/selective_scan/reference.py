"""The selective scan one token at a time: slow, and what every other form is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def step(
  x: Array,
  dt: Array,
  a: Array,
  b: Array,
  c: Array,
  d: Array | None,
  state: Array,
  active: Array | None = None,
) -> tuple[Array, Array]:
  """``h <- exp(dt a) h + dt x b``; ``y = sum_n c h + d x``, elementwise in the dtype of ``state``.

  Args:
    x, dt: [B, D]; a: [D, N]; b, c: [B, G, N]; d: [D] or None; state: [B, D, N].
    active: bool [B], rows whose state changes; None: all.

  Returns:
    y [B, D] in the dtype of ``state``, and the new state.
  """
  x, dt = x.astype(state.dtype), dt.astype(state.dtype)
  channels_per_group = x.shape[1] // b.shape[1]
  b = jnp.repeat(b.astype(state.dtype), channels_per_group, axis=1)
  c = jnp.repeat(c.astype(state.dtype), channels_per_group, axis=1)
  new = jnp.exp(dt[..., None] * a) * state + (dt * x)[..., None] * b
  # Before y is read from it, so that XLA writes the state once, in place.
  state = new if active is None else jnp.where(active[:, None, None], new, state)
  y = jnp.sum(state * c, axis=-1)
  if d is not None:
    y = y + d * x
  return y, state


def selective_scan(
  x: Array,
  dt: Array,
  a: Array,
  b: Array,
  c: Array,
  d: Array | None,
  initial_state: Array,
  resets: Array | None,
  chunk_size: int,
) -> tuple[Array, Array]:
  """``step`` scanned over time; ``resets[b, t]`` empties the state before token t."""
  del chunk_size
  if resets is None:
    resets = jnp.zeros(dt.shape[:2], bool)

  def body(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    x, dt, b, c, reset = token
    state = jnp.where(reset[:, None, None], 0.0, state)
    y, state = step(x, dt, a, b, c, d, state)
    return state, y

  tokens = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (x, dt, b, c, resets))
  state, y = jax.lax.scan(body, initial_state, tokens)
  return jnp.moveaxis(y, 0, 1), state
