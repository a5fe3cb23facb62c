"""The selective scan token by token in chunks, plain XLA; the fast one on CPU.

The state is elementwise in its channels, so there is nothing for matrix products to gain. What
costs is memory traffic: channels are last, where vector registers run along them, and in training
only the states between chunks are stored.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

# Accelerators would round float32 factors otherwise.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class _Chunk(NamedTuple):
  """Q tokens of every row, time first: the order in which the scan reads them."""

  x: Array  # [Q, B, G, D/G]
  dt: Array  # [Q, B, G, D/G]
  b: Array  # [Q, B, G, N]
  c: Array  # [Q, B, G, N]
  reset: Array | None  # bool [Q, B]: whether the state is emptied before the token


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
  """A ``lax.scan`` over chunks of a ``lax.scan`` over tokens, forwards and, for the gradient, back.

  Kept for the gradient are the incoming states of the chunks; the states of one chunk at a time are
  computed again. No decay is divided by and no exponent is positive, so any ``dt a <= 0`` will do.
  Time is padded with ``dt = 0`` to a whole number of chunks. Reverse mode only.
  """
  batch, time, channels = x.shape
  groups, size = b.shape[2:]
  chunk = min(chunk_size, time)
  count = -(-time // chunk)

  def split(v: Array) -> Array:
    """[B, T, ...] to [chunks, Q, B, ...]."""
    v = jnp.pad(v, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (v.ndim - 2))
    return jnp.moveaxis(v, 1, 0).reshape(count, chunk, batch, *v.shape[2:])

  per_group = (batch, time, groups, channels // groups)
  chunks = _Chunk(
    x=split(x.reshape(per_group)),
    dt=split(dt.reshape(per_group)),
    b=split(b),
    c=split(c),
    reset=None if resets is None else split(resets),
  )
  rates = jnp.swapaxes(a.reshape(groups, -1, size), -1, -2)
  state = jnp.swapaxes(initial_state.reshape(batch, groups, -1, size), -1, -2)
  y, state = _scan(state, chunks, rates)
  y = jnp.moveaxis(y.reshape(count * chunk, batch, channels)[:time], 0, 1)
  if d is not None:
    y = y + d * x
  return y, jnp.swapaxes(state, -1, -2).reshape(initial_state.shape)


_Kept = tuple[_Chunk, Array, Array]  # chunks, a, incoming states


@jax.custom_vjp
def _scan(state: Array, chunks: _Chunk, a: Array) -> tuple[Array, Array]:
  """Outputs of all chunks [chunks, Q, B, G, D/G] without the skip, and the last state.

  Args:
    state: [B, G, N, D/G]. a: [G, N, D/G].
  """
  (y, state), _ = _scan_forward(state, chunks, a)
  return y, state


def _scan_forward(state: Array, chunks: _Chunk, a: Array) -> tuple[tuple[Array, Array], _Kept]:
  def body(state: Array, chunk: _Chunk) -> tuple[Array, tuple[Array, Array]]:
    new, y = _chunk_forward(state, chunk, a)
    return new, (y, state)

  last, (y, states) = jax.lax.scan(body, state, chunks)
  return (y, last), (chunks, a, states)


def _scan_backward(kept: _Kept, gradients: tuple[Array, Array]) -> tuple[Array, _Chunk, Array]:
  chunks, a, states = kept
  to_y, to_last = gradients

  def body(
    carry: tuple[Array, Array], step: tuple[_Chunk, Array, Array]
  ) -> tuple[tuple[Array, Array], _Chunk]:
    to_state, to_a = carry
    chunk, entered, to_y = step
    return _chunk_backward(to_state, to_a, a, chunk, entered, to_y)

  (to_state, to_a), to_chunks = jax.lax.scan(
    body, (to_last, jnp.zeros_like(to_last)), (chunks, states, to_y), reverse=True
  )
  return to_state, to_chunks, jnp.sum(to_a, axis=0)


_scan.defvjp(_scan_forward, _scan_backward)


# Below, axes are: t token, z batch, g group, n state size, p channel in group.


def _update(state: Array, token: _Chunk, a: Array) -> Array:
  """State after a token, from the one before it; the sizes of ``_Chunk`` without Q."""
  if token.reset is not None:
    state = jnp.where(token.reset[:, None, None, None], 0.0, state)
  decay = jnp.exp(token.dt[..., None, :] * a)
  return decay * state + token.b[..., None] * (token.dt * token.x)[..., None, :]


def _chunk_forward(state: Array, chunk: _Chunk, a: Array) -> tuple[Array, Array]:
  def body(state: Array, token: _Chunk) -> tuple[Array, Array]:
    state = _update(state, token, a)
    return state, _einsum("zgnp,zgn->zgp", state, token.c)

  return jax.lax.scan(body, state, _widened(chunk, state.dtype))


def _chunk_backward(
  to_state: Array, to_a: Array, a: Array, chunk: _Chunk, entered: Array, to_y: Array
) -> tuple[tuple[Array, Array], _Chunk]:
  """Gradients of the incoming state and of a [B, G, N, D/G], added to ``to_a``, and of the chunk.

  Args:
    to_state: gradient of the outgoing state. entered: the incoming state.
    to_y: gradient of the outputs [Q, B, G, D/G].
  """
  wide = _widened(chunk, entered.dtype)

  def forward(state: Array, step: tuple[_Chunk, Array]) -> tuple[Array, tuple[Array, Array]]:
    token, to_y = step
    new = _update(state, token, a)
    return new, (state, _einsum("zgnp,zgp->zgn", new, to_y))

  _, (states, to_c) = jax.lax.scan(forward, entered, (wide, to_y))

  def backward(
    carry: tuple[Array, Array], step: tuple[_Chunk, Array, Array]
  ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    to_state, to_a = carry
    token, to_y, state = step
    to_new = to_state + token.c[..., None] * to_y[..., None, :]
    to_state = jnp.exp(token.dt[..., None, :] * a) * to_new
    to_rate = to_state * state  # the gradient of dt a
    if token.reset is not None:
      reset = token.reset[:, None, None, None]
      to_state, to_rate = jnp.where(reset, 0.0, to_state), jnp.where(reset, 0.0, to_rate)
    return (to_state, to_a + token.dt[..., None, :] * to_rate), (to_new, to_rate)

  carry, (to_new, to_rate) = jax.lax.scan(
    backward, (to_state, to_a), (wide, to_y, states), reverse=True
  )
  to_input = _einsum("tzgnp,tzgn->tzgp", to_new, wide.b)
  to_dt = wide.x * to_input + _einsum("tzgnp,gnp->tzgp", to_rate, a)
  to_b = _einsum("tzgnp,tzgp->tzgn", to_new, wide.dt * wide.x)
  to_chunk = _Chunk(
    x=(wide.dt * to_input).astype(chunk.x.dtype),
    dt=to_dt.astype(chunk.dt.dtype),
    b=to_b.astype(chunk.b.dtype),
    c=to_c.astype(chunk.c.dtype),
    reset=None,
  )
  return carry, to_chunk


def _widened(chunk: _Chunk, dtype: jnp.dtype) -> _Chunk:
  x, dt, b, c = (v.astype(dtype) for v in chunk[:4])
  return _Chunk(x, dt, b, c, chunk.reset)
