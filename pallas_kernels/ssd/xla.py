"""SSD in chunks of dense products, plain XLA; the fast one on CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

# Finite, so that a masked exponent gives exactly 0 and a zero gradient; -inf - -inf would be NaN.
_MASKED = -1e30


class _Chunk(NamedTuple):
  """Q tokens of every row, time last but one: the dense products then need no transposition."""

  x: Array  # [B, G, H/G, Q, P]
  dt: Array  # [B, G, H/G, Q]
  b: Array  # [B, G, Q, N]
  c: Array  # [B, G, Q, N]
  run: Array | None  # int32 [B, Q]: resets so far in the chunk; tokens of one count share a state


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
  """One ``lax.scan`` step a chunk of Q tokens, forwards and, for the gradient, backwards.

  With ``s`` the running sum of ``dt a`` inside the chunk and S the incoming state,
  ``y_i = sum_{j<=i} (c_i b_j) exp(s_i - s_j) dt_j x_j + exp(s_i) S c_i`` and
  ``S <- exp(s_Q) S + sum_j exp(s_Q - s_j) dt_j x_j b_jᵀ``. Terms across a reset are masked in the
  exponent, before ``exp``. Kept for the gradient are the incoming states; the Q x Q matrices of
  one chunk at a time are alive. Time is padded with ``dt = 0``. Reverse mode only.
  """
  batch, time, heads, width = x.shape
  groups, size = b.shape[2:]
  per_group = heads // groups
  chunk = min(chunk_size, time)
  count = -(-time // chunk)

  def split(v: Array, *order: int) -> Array:
    """Cuts time into chunks, [B, chunks, Q, ...], and orders the axes."""
    v = jnp.pad(v, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (v.ndim - 2))
    return jnp.transpose(v.reshape(batch, count, chunk, *v.shape[2:]), order)

  chunks = _Chunk(
    x=split(x.reshape(batch, time, groups, per_group, width), 1, 0, 3, 4, 2, 5),
    dt=split(dt.reshape(batch, time, groups, per_group), 1, 0, 3, 4, 2),
    b=split(b, 1, 0, 3, 2, 4),
    c=split(c, 1, 0, 3, 2, 4),
    run=None if resets is None else jnp.cumsum(split(resets, 1, 0, 2), axis=2, dtype=jnp.int32),
  )
  state = initial_state.reshape(batch, groups, per_group, width, size)
  y, state = _scan(state, chunks, a.reshape(groups, per_group))
  y = jnp.transpose(y, (1, 0, 4, 2, 3, 5)).reshape(batch, -1, heads, width)[:, :time]
  if d is not None:
    y = y + d[:, None] * x
  return y, state.reshape(initial_state.shape)


_Kept = tuple[_Chunk, Array, Array]  # chunks, a, incoming states


class _Decays(NamedTuple):
  """How much of what is left where, from the running sums of one chunk."""

  pair: Array  # [B, G, H/G, Q, Q] of the input of token j in the output of token i
  entering: Array  # [B, G, H/G, Q] of the incoming state at each token
  leaving: Array  # [B, G, H/G, Q] of each token in the outgoing state
  kept: Array  # [B, G, H/G] of the incoming state in the outgoing one


@jax.custom_vjp
def _scan(state: Array, chunks: _Chunk, a: Array) -> tuple[Array, Array]:
  """Outputs of all chunks [chunks, B, G, H/G, Q, P] without the skip, and the last state."""
  (y, state), _ = _scan_forward(state, chunks, a)
  return y, state


def _scan_forward(state: Array, chunks: _Chunk, a: Array) -> tuple[tuple[Array, Array], _Kept]:
  def body(state: Array, chunk: _Chunk) -> tuple[Array, tuple[Array, Array]]:
    y, new = _chunk_forward(state, chunk, a)
    return new, (y, state)

  last, (y, states) = jax.lax.scan(body, state, chunks)
  return (y, last), (chunks, a, states)


def _scan_backward(kept: _Kept, gradients: tuple[Array, Array]) -> tuple[Array, _Chunk, Array]:
  chunks, a, states = kept

  def body(
    carry: tuple[Array, Array], step: tuple[_Chunk, Array, Array]
  ) -> tuple[tuple[Array, Array], _Chunk]:
    to_state, to_a = carry
    to_state, to_chunk, more = _chunk_backward(to_state, a, *step)
    return (to_state, to_a + more), to_chunk

  to_y, to_last = gradients
  (to_state, to_a), to_chunks = jax.lax.scan(
    body, (to_last, jnp.zeros_like(a)), (chunks, states, to_y), reverse=True
  )
  return to_state, to_chunks, to_a


_scan.defvjp(_scan_forward, _scan_backward)


# Below, axes are: z batch, g group, h head in group, i j token, p width, n state size.


def _chunk_forward(state: Array, chunk: _Chunk, a: Array) -> tuple[Array, Array]:
  product = _product(chunk)
  x, dt, b, c = (v.astype(state.dtype) for v in chunk[:4])
  decays = _decays(dt * a[..., None], chunk.run)
  inputs = dt[..., None] * x
  mixing = product("zgin,zgjn->zgij", c, b)[:, :, None] * decays.pair
  y = product("zghij,zghjp->zghip", mixing, inputs)
  y = y + decays.entering[..., None] * product("zgin,zghpn->zghip", c, state)
  gathered = product("zghjp,zgjn->zghpn", decays.leaving[..., None] * inputs, b)
  return y, decays.kept[..., None, None] * state + gathered


def _chunk_backward(
  to_left: Array, a: Array, chunk: _Chunk, entered: Array, to_y: Array
) -> tuple[Array, _Chunk, Array]:
  """Gradients of the incoming state, of the chunk and of a.

  A decay of token t scales what crosses t: pairs i >= t > j, the incoming state at outputs i >= t,
  inputs j < t in the outgoing state, and the incoming state in the outgoing one. Those products are
  summed as they are; differences of larger sums would cancel where decays are strong.

  Args:
    to_left: gradient of the outgoing state. entered: the incoming state.
    to_y: gradient of the chunk's outputs.
  """
  product = _product(chunk)
  x, dt, b, c = (v.astype(entered.dtype) for v in chunk[:4])
  decays = _decays(dt * a[..., None], chunk.run)
  inputs = dt[..., None] * x
  mixing = product("zgin,zgjn->zgij", c, b)[:, :, None] * decays.pair

  # The small operand first, and heads added one by one: XLA:CPU is slow at the direct forms.
  to_input = jnp.swapaxes(product("zghip,zghij->zghpj", to_y, mixing), -1, -2)
  from_left = decays.leaving[..., None] * product("zgjn,zghpn->zghjp", b, to_left)
  to_input += from_left
  pairs = product("zghip,zghjp->zghij", to_y, inputs)
  to_pair = pairs * decays.pair
  to_product = functools.reduce(jnp.add, [to_pair[:, :, h] for h in range(a.shape[1])])
  to_entered = decays.entering[..., None] * to_y
  to_b = jnp.swapaxes(product("zgin,zgij->zgnj", c, to_product), -1, -2)
  to_b += product("zghjp,zghpn->zgjn", decays.leaving[..., None] * inputs, to_left)
  to_c = product("zgij,zgjn->zgin", to_product, b)
  to_c += product("zghip,zghpn->zgin", to_entered, entered)

  time = dt.shape[-1]
  before = jnp.triu(jnp.ones((time, time), dt.dtype), 1)  # [j, t]: j < t
  crossing = jnp.sum(jnp.tril(product("zghij,jt->zghit", pairs * mixing, before)), axis=-2)
  at_outputs = jnp.sum(to_entered * product("zgin,zghpn->zghip", c, entered), axis=-1)
  at_inputs = jnp.sum(from_left * inputs, axis=-1)
  through = decays.kept * jnp.sum(to_left * entered, axis=(-1, -2))
  to_rate = crossing + through[..., None]
  to_rate += _exactly("zghi,ti->zght", at_outputs, 1.0 - before.T)
  to_rate += _exactly("zghj,jt->zght", at_inputs, before)

  to_scale = jnp.sum(to_input * x, axis=-1)
  to_dt = to_rate * a[..., None] + to_scale
  to_entered = product("zghip,zgin->zghpn", to_entered, c)
  to_entered += decays.kept[..., None, None] * to_left
  to_chunk = _Chunk(
    x=(dt[..., None] * to_input).astype(chunk.x.dtype),
    dt=to_dt.astype(chunk.dt.dtype),
    b=to_b.astype(chunk.b.dtype),
    c=to_c.astype(chunk.c.dtype),
    run=None,
  )
  return to_entered, to_chunk, jnp.sum(to_rate * dt, axis=(0, -1))


def _decays(rate: Array, run: Array | None) -> _Decays:
  """From ``rate = dt a`` [z, g, h, i]; everything across a reset is exactly 0."""
  time = rate.shape[-1]
  seen = jnp.tril(jnp.ones((time, time), bool))[None]
  if run is not None:
    seen = seen & (run[:, :, None] == run[:, None, :])
  # As a product the sum starts anew at a reset, so no rounding of one sequence reaches the next.
  sums = jnp.broadcast_to(seen, (rate.shape[0], time, time)).astype(rate.dtype)
  total = _exactly("zij,zghj->zghi", sums, rate)
  entering, leaving, kept = total, total[..., -1:] - total, total[..., -1]
  if run is not None:
    ends = run[:, None, None]
    entering = jnp.where(ends == 0, entering, _MASKED)
    leaving = jnp.where(ends == ends[..., -1:], leaving, _MASKED)
    kept = jnp.where(ends[..., -1] == 0, kept, _MASKED)
  pair = jnp.where(seen[:, None, None], total[..., :, None] - total[..., None, :], _MASKED)
  return _Decays(jnp.exp(pair), jnp.exp(entering), jnp.exp(leaving), jnp.exp(kept))


_exactly = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _product(chunk: _Chunk) -> Callable[..., Array]:
  """einsum in which products of float32 inputs stay float32 on accelerators too."""
  narrow = chunk.x.dtype == jnp.bfloat16
  return functools.partial(jnp.einsum, precision=None if narrow else jax.lax.Precision.HIGHEST)
