"""Causal depthwise convolution as K shifted multiply-adds, plain XLA; the fast one on CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d.activation import Activation, activate, slope
from pallas_kernels.causal_conv1d.taps import look_ahead, look_ahead_from_tail

Array = jax.Array

# Numbers in a tile of the backward pass on a CPU: what it touches stays in a core's cache.
_TILE = 1 << 16
# Parts of a tile that are added to each other; sums inside a part are left to the end.
_PARTS = 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def causal_conv1d(
  x: Array,
  w: Array,
  bias: Array,
  initial_tail: Array,
  reach: Array | None,
  activation: Activation | None,
) -> Array:
  """``act(bias + sum_j w[K-1-j] x_{t-j})`` over the inputs j = 0..K-1 back that token t sees.

  Only the arguments are kept for the gradient, which is one pass over time from its end: in tiles
  of some tokens on a CPU, at once elsewhere. Reverse mode only.

  Args:
    x: [B, T, C].
    w, bias: [K, C] and [C] in the dtype of the sums.
    initial_tail: [B, K-1, C] in the dtype of x.
    reach: int32 [B, T] in -1..K-1, token t sees the inputs ``j <= reach``; None: all.
    activation: "silu" or None.

  Returns:
    [B, T, C] in the dtype of x, 0 where ``reach`` is -1.
  """
  kept = initial_tail.shape[1]
  # Two pieces, so that no copy of x behind its tail is made.
  head = jnp.concatenate([initial_tail, x[:, :kept]], axis=1)
  pieces = [_filter(head, w, bias, None if reach is None else reach[:, :kept], activation)]
  if x.shape[1] > kept:
    pieces.append(_filter(x, w, bias, None if reach is None else reach[:, kept:], activation))
  return jnp.concatenate(pieces, axis=1)


def _filter(
  columns: Array, w: Array, bias: Array, reach: Array | None, activation: Activation | None
) -> Array:
  """Outputs at all columns but the first K-1."""
  y = activate(_look_back(_inputs(columns, w, reach), w, bias), activation)
  if reach is not None:
    y = jnp.where((reach >= 0)[..., None], y, 0.0)
  return y.astype(columns.dtype)


def _inputs(columns: Array, w: Array, reach: Array | None) -> list[Array]:
  """The inputs j = 0..K-1 back of every column but the first K-1, 0 beyond its reach."""
  past = w.shape[0] - 1
  time = columns.shape[1] - past
  inputs = [columns[:, past - j : past - j + time].astype(w.dtype) for j in range(past + 1)]
  if reach is None:
    return inputs
  return [jnp.where((reach >= j)[..., None], v, 0.0) for j, v in enumerate(inputs)]


def _look_back(inputs: list[Array], w: Array, bias: Array) -> Array:
  """``bias + sum_j w[K-1-j] inputs[j]``, the oldest first."""
  total = bias
  for weight, v in zip(w, reversed(inputs), strict=True):
    total = total + weight * v
  return total


class _Kept(NamedTuple):
  x: Array
  w: Array
  bias: Array
  initial_tail: Array
  reach: Array | None


def _forward(
  x: Array,
  w: Array,
  bias: Array,
  initial_tail: Array,
  reach: Array | None,
  activation: Activation | None,
) -> tuple[Array, _Kept]:
  y = causal_conv1d(x, w, bias, initial_tail, reach, activation)
  return y, _Kept(x, w, bias, initial_tail, reach)


_Gradients = tuple[Array, Array, Array, Array]  # of x, w, bias and initial_tail


def _backward(activation: Activation | None, kept: _Kept, to_y: Array) -> tuple[Array | None, ...]:
  batch, time, channels = kept.x.shape
  tile = max(kept.initial_tail.shape[1], _TILE // (batch * channels))

  def walk(tile: int) -> Callable[[_Kept, Array], _Gradients]:
    tile = -(-tile // _PARTS) * _PARTS
    return functools.partial(_walk, activation=activation, tile=tile)

  if time <= tile:
    return *walk(time)(kept, to_y), None
  return *jax.lax.platform_dependent(kept, to_y, cpu=walk(tile), default=walk(time)), None


class _Carry(NamedTuple):
  """What the tokens from some token on have given."""

  to_x: Array  # [B, T, C] gradients of their inputs; before them, zeros
  first: Array  # [B, K-1, C] gradients of the weighted sums of the first of them
  to_w: list[Array]  # of the inputs 0..K-1 back, [B, rows, C], each to be summed over rows
  to_bias: Array  # [B, rows, C]


def _walk(kept: _Kept, to_y: Array, *, activation: Activation | None, tile: int) -> _Gradients:
  """Gradients by a walk over tiles of tokens, from the last to the first."""
  x, w, bias, initial_tail, reach = kept
  (batch, time, channels), past = x.shape, initial_tail.shape[1]
  if reach is not None:
    reach = jnp.pad(reach, ((0, 0), (0, past)), constant_values=-1)

  def step(carry: _Carry, begin: Array | int, before: Array, size: int) -> _Carry:
    """The tokens from ``begin`` on; ``before``: the K-1 inputs before them."""
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
    columns = jnp.concatenate([before, cut(x, begin, size)], axis=1)
    ahead = None if reach is None else cut(reach, begin, size + past)
    inputs = _inputs(columns, w, None if ahead is None else ahead[:, :size])
    to_sum = cut(to_y, begin, size).astype(w.dtype)
    if ahead is not None:
      to_sum = jnp.where((ahead[:, :size] >= 0)[..., None], to_sum, 0.0)
    to_sum = to_sum * slope(_look_back(inputs, w, bias), activation)
    # Without the barrier the slope would be computed anew for every input that a token sees.
    sums = jax.lax.optimization_barrier(jnp.concatenate([to_sum, carry.first], axis=1))
    to_x = look_ahead(sums, w, ahead).astype(x.dtype)
    to_sum = sums[:, :size]
    return _Carry(
      to_x=jax.lax.dynamic_update_slice_in_dim(carry.to_x, to_x, begin, axis=1),
      first=sums[:, :past],
      to_w=[total + _fold(to_sum * v, tile) for total, v in zip(carry.to_w, inputs, strict=True)],
      to_bias=carry.to_bias + _fold(to_sum, tile),
    )

  def whole_step(carry: _Carry, begin: Array) -> tuple[_Carry, None]:
    before = jax.lax.dynamic_slice_in_dim(x, jnp.maximum(begin - past, 0), past, axis=1)
    return step(carry, begin, jnp.where(begin == 0, initial_tail, before), tile), None

  rows = jnp.zeros((batch, tile // _PARTS, channels), w.dtype)
  none = jnp.zeros((batch, past, channels), w.dtype)
  # The last tile stands apart, for it may be a rest.
  begin = (time - 1) // tile * tile
  before = x[:, begin - past : begin] if begin else initial_tail
  carry = step(
    _Carry(jnp.zeros_like(to_y), none, [rows] * (past + 1), rows), begin, before, time - begin
  )
  if begin:
    carry, _ = jax.lax.scan(whole_step, carry, jnp.arange(0, begin, tile), reverse=True)
  to_tail = look_ahead_from_tail(carry.first, w, kept.reach)
  to_w = jnp.stack([jnp.sum(v, axis=(0, 1)) for v in reversed(carry.to_w)])
  return carry.to_x, to_w, jnp.sum(carry.to_bias, axis=(0, 1)), to_tail.astype(x.dtype)


def _fold(v: Array, tile: int) -> Array:
  """[B, tile / parts, C] of [B, T, C]: sums over tokens that many apart, with channels abreast."""
  batch, time, channels = v.shape
  v = jnp.pad(v, ((0, 0), (0, tile - time), (0, 0)))
  return jnp.sum(v.reshape(batch, _PARTS, -1, channels), axis=1)


causal_conv1d.defvjp(_forward, _backward)
