"""SSD one token at a time: slow, and what every other implementation is compared with."""

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
  """``S <- exp(dt a) S + (dt x) bᵀ``; ``y = S c + d x``, elementwise in the dtype of ``state``.

  Args:
    x: [B, H, P]; dt: [B, H]; a, d: [H]; b, c: [B, G, N]; state: [B, H, P, N].
    active: bool [B], rows whose state changes; None: all.

  Returns:
    y [B, H, P] in the dtype of ``state``, and the new state.
  """
  x, dt = x.astype(state.dtype), dt.astype(state.dtype)
  heads_per_group = x.shape[1] // b.shape[1]
  b = jnp.repeat(b.astype(state.dtype), heads_per_group, axis=1)
  c = jnp.repeat(c.astype(state.dtype), heads_per_group, axis=1)
  decay = jnp.exp(dt * a)
  new = decay[..., None, None] * state + (dt[..., None] * x)[..., None] * b[:, :, None, :]
  # Before y is read from it, so that XLA writes the state once, in place.
  state = new if active is None else jnp.where(active[:, None, None, None], new, state)
  y = jnp.sum(state * c[:, :, None, :], axis=-1)
  if d is not None:
    y = y + d[:, None] * x
  return y, state


def ssd(
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
    state = jnp.where(reset[:, None, None, None], 0.0, state)
    y, state = step(x, dt, a, b, c, d, state)
    return state, y

  tokens = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (x, dt, b, c, resets))
  state, y = jax.lax.scan(body, initial_state, tokens)
  return jnp.moveaxis(y, 0, 1), state
