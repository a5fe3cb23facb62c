"""SSD in chunks of dense products, plain XLA; the fast one on CPU."""

from __future__ import annotations

import functools
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
  """One ``lax.scan`` step a chunk of Q tokens; the carry is the state, the only thing saved.

  With ``s`` the running sum of ``dt a`` inside the chunk and S the incoming state,
  ``y_i = sum_{j<=i} (c_i b_j) exp(s_i - s_j) dt_j x_j + exp(s_i) S c_i`` and
  ``S <- exp(s_Q) S + sum_j exp(s_Q - s_j) dt_j x_j b_jᵀ``. Terms across a reset are masked in the
  exponent, before ``exp``. The chunk is recomputed in the backward pass (``jax.checkpoint``), so
  that the Q x Q matrices of one chunk at a time are alive. Time is padded with ``dt = 0``.
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
  body = functools.partial(
      _scan_chunk,
      a=a.reshape(groups, per_group),
      # Products of float32 inputs stay float32 on accelerators too.
      precision=None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
  )
  state, y = jax.lax.scan(
      jax.checkpoint(body), initial_state.reshape(batch, groups, per_group, width, size), chunks
  )
  y = jnp.transpose(y, (1, 0, 4, 2, 3, 5)).reshape(batch, -1, heads, width)[:, :time]
  if d is not None:
    y = y + d[:, None] * x
  return y, state.reshape(initial_state.shape)


def _scan_chunk(
    state: Array, chunk: _Chunk, *, a: Array, precision: jax.lax.Precision | None
) -> tuple[Array, Array]:
  """One chunk. Axes: z batch, g group, h head in group, i j token, p width, n state size."""
  x, dt, b, c = (v.astype(state.dtype) for v in chunk[:4])
  product = functools.partial(jnp.einsum, precision=precision)
  seen = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))[None]
  if chunk.run is not None:
    seen = seen & (chunk.run[:, :, None] == chunk.run[:, None, :])
  # As a product the sum starts anew at a reset, so no rounding of one sequence reaches the next.
  total = jnp.einsum(
      "zij,zghj->zghi",
      jnp.broadcast_to(seen, (x.shape[0], *seen.shape[1:])).astype(state.dtype),
      dt * a[..., None],
      precision=jax.lax.Precision.HIGHEST,
  )
  entering, leaving, kept = total, total[..., -1:] - total, total[..., -1]
  if chunk.run is not None:
    run = chunk.run[:, None, None]
    entering = jnp.where(run == 0, entering, _MASKED)
    leaving = jnp.where(run == run[..., -1:], leaving, _MASKED)
    kept = jnp.where(run[..., -1] == 0, kept, _MASKED)
  pair = jnp.where(seen[:, None, None], total[..., :, None] - total[..., None, :], _MASKED)

  inputs = dt[..., None] * x
  mixing = product("zgin,zgjn->zgij", c, b)[:, :, None] * jnp.exp(pair)
  y = product("zghij,zghjp->zghip", mixing, inputs)
  y = y + jnp.exp(entering)[..., None] * product("zgin,zghpn->zghip", c, state)
  gathered = product("zghjp,zgjn->zghpn", jnp.exp(leaving)[..., None] * inputs, b)
  return jnp.exp(kept)[..., None, None] * state + gathered, y
