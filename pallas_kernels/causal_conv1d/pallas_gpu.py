"""Causal depthwise convolution for GPUs: Triton kernels over tiles of tokens and channels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.causal_conv1d.activation import Activation, activate, slope
from pallas_kernels.causal_conv1d.taps import look_ahead_from_tail
from pallas_kernels.implementations import on_platform

Array = jax.Array
Ref = Any

# Tokens and channels of a tile, powers of two; half a dozen such arrays fit in the registers of
# four warps, and a row of channels is a whole line of memory.
_TIME = 32
_CHANNELS = 64
_WARPS = 4
# Tiles that one program of the backward pass walks over, adding up its gradients of w and bias.
_WALK = 8
# The backward pass holds 2K - 1 tiles of inputs.
_MOST_TAPS = 4


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def causal_conv1d(
  x: Array,
  w: Array,
  bias: Array,
  initial_tail: Array,
  reach: Array | None,
  activation: Activation | None,
) -> Array:
  """One program a tile, which reads the K-1 tokens before it anew from the cache.

  The backward pass computes the weighted sums of K-1 tokens after the tile anew as well, so that
  tiles need nothing of each other; the gradients of w and bias leave it as one part every few
  tiles. Only the arguments are kept for it. Arguments and result: see ``xla.causal_conv1d``.
  Reverse mode only.

  Raises:
    ValueError: neither float32 nor bfloat16, or a filter of more than 4 taps.
  """
  if x.dtype not in (jnp.float32, jnp.bfloat16) or w.dtype != jnp.float32:
    raise ValueError(
      "causal_conv1d: implementation='pallas_gpu' takes float32 or bfloat16, got x "
      f"{x.dtype} and sums in {w.dtype}; use implementation='xla'."
    )
  if w.shape[0] > _MOST_TAPS:
    raise ValueError(
      f"causal_conv1d: implementation='pallas_gpu' takes K <= {_MOST_TAPS} taps, got w {w.shape}; "
      "use implementation='xla'."
    )
  batch, time, channels = x.shape
  return _run(
    functools.partial(_forward_kernel, activation=activation),
    (pl.cdiv(channels, _CHANNELS), pl.cdiv(time, _TIME), batch),
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    [x, initial_tail, w, bias] + ([] if reach is None else [reach]),
  )


def _run(kernel: Callable[..., None], grid: tuple[int, ...], out: Any, arguments: list[Array]):
  def call(interpret: bool) -> Callable[..., Any]:
    return pl.pallas_call(
      kernel,
      grid=grid,
      out_shape=out,
      compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
      interpret=interpret,
    )

  return on_platform("gpu", call, *arguments)


class _Reader(NamedTuple):
  """What a program reads of its row and its channels; places are counted from the row's begin."""

  x: Ref  # [B, T, C]
  initial_tail: Ref  # [B, K-1, C]
  w: Ref  # [K, C]
  bias: Ref  # [C]
  reach: Ref | None  # [B, T]
  row: Array
  channels: Array  # [channels of a tile]

  @property
  def kept(self) -> int:
    return self.initial_tail.shape[1]

  @property
  def real(self) -> Array:
    """Which of the channels are there."""
    return self.channels < self.x.shape[2]

  def taps(self) -> list[Array]:
    """K of [channels]."""
    return [
      triton.load(self.w.at[k, self.channels], mask=self.real, other=0.0)
      for k in range(self.kept + 1)
    ]

  def offset(self) -> Array:
    return triton.load(self.bias.at[self.channels], mask=self.real, other=0.0)

  def rows(self, ref: Ref, place: Array, within: Array) -> Array:
    """float32 [tokens, channels] of ``ref`` [B, T, C] at the given places, 0 but for ``within``."""
    place = jnp.clip(place, 0, ref.shape[1] - 1)
    mask = within[:, None] & self.real[None, :]
    values = triton.load(
      ref.at[self.row, place[:, None], self.channels[None, :]], mask=mask, other=0.0
    )
    return values.astype(jnp.float32)

  def inputs(self, place: Array) -> Array:
    """Of the row and the tail before it, 0 past its end."""
    inside = self.rows(self.x, place, (place >= 0) & (place < self.x.shape[1]))
    return inside + self.rows(self.initial_tail, place + self.kept, place < 0)

  def reaches(self, place: Array) -> Array | None:
    """[tokens, 1]; -1 past the end."""
    if self.reach is None:
      return None
    time = self.x.shape[1]
    inside = place < time
    place = jnp.minimum(place, time - 1)
    return triton.load(self.reach.at[self.row, place], mask=inside, other=-1)[:, None]


def _weighted(inputs: list[Array], w: list[Array], bias: Array) -> Array:
  """``bias + sum_j w[K-1-j] inputs[j]``."""
  total = bias[None, :]
  for weight, v in zip(w, reversed(inputs), strict=True):
    total = total + weight[None, :] * v
  return total


def _masked(v: Array, reach: Array | None, j: int) -> Array:
  return v if reach is None else jnp.where(reach >= j, v, 0.0)


def _forward_kernel(*refs: Ref, activation: Activation | None) -> None:
  x, initial_tail, w, bias, *marks, y = refs
  channels = pl.program_id(0) * _CHANNELS + jnp.arange(_CHANNELS)
  place = pl.program_id(1) * _TIME + jnp.arange(_TIME)
  reach = marks[0] if marks else None
  reader = _Reader(x, initial_tail, w, bias, reach, pl.program_id(2), channels)
  sees = reader.reaches(place)
  seen = [_masked(reader.inputs(place - j), sees, j) for j in range(reader.kept + 1)]
  total = _weighted(seen, reader.taps(), reader.offset())
  out = _masked(activate(total, activation), sees, 0)
  triton.store(
    y.at[reader.row, place[:, None], channels[None, :]],
    out.astype(y.dtype),
    mask=(place < y.shape[1])[:, None] & reader.real[None, :],
  )


def _backward_kernel(*refs: Ref, activation: Activation | None) -> None:
  x, initial_tail, w, bias, *marks, to_y, to_x, first, to_w, to_bias = refs
  channels = pl.program_id(0) * _CHANNELS + jnp.arange(_CHANNELS)
  part = pl.program_id(1)
  reach = marks[0] if marks else None
  reader = _Reader(x, initial_tail, w, bias, reach, pl.program_id(2), channels)
  kept, time = reader.kept, to_y.shape[1]
  taps, offset = reader.taps(), reader.offset()

  def tile(step: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
    begin = (part * _WALK + step) * _TIME
    place = begin + jnp.arange(_TIME)
    # By offset from the token: K-1 inputs before it, its own, K-1 after it.
    near = {i: reader.inputs(place + i) for i in range(-kept, kept + 1)}
    to_input = jnp.zeros((_TIME, _CHANNELS), jnp.float32)
    for j in reversed(range(kept + 1)):
      sees = reader.reaches(place + j)
      seen = [_masked(near[j - i], sees, i) for i in range(kept + 1)]
      arrived = _masked(reader.rows(to_y, place + j, place + j < time), sees, 0)
      to_sum = arrived * slope(_weighted(seen, taps, offset), activation)
      to_input += taps[kept - j][None, :] * _masked(to_sum, sees, j)
    # Of the last turn: the token's own sum and what it saw.
    totals = tuple(
      total + jnp.sum(v, axis=0)
      for total, v in zip(totals, [to_sum] + [to_sum * v for v in seen], strict=True)
    )
    inside = (place < time)[:, None] & reader.real[None, :]
    triton.store(
      to_x.at[reader.row, place[:, None], channels[None, :]],
      to_input.astype(to_x.dtype),
      mask=inside,
    )
    triton.store(
      first.at[reader.row, jnp.arange(_TIME)[:, None], channels[None, :]],
      to_sum,
      mask=(begin == 0) & jnp.broadcast_to(reader.real[None, :], to_sum.shape),
    )
    return totals

  nothing = jnp.zeros((_CHANNELS,), jnp.float32)
  to_bias_part, *to_w_parts = jax.lax.fori_loop(0, _WALK, tile, (nothing,) * (kept + 2))
  triton.store(to_bias.at[reader.row, part, channels], to_bias_part, mask=reader.real)
  for j, v in enumerate(to_w_parts):
    triton.store(to_w.at[reader.row, part, kept - j, channels], v, mask=reader.real)


_Kept = tuple[Array, Array, Array, Array, Array | None]


def _forward(
  x: Array,
  w: Array,
  bias: Array,
  initial_tail: Array,
  reach: Array | None,
  activation: Activation | None,
) -> tuple[Array, _Kept]:
  y = causal_conv1d(x, w, bias, initial_tail, reach, activation)
  return y, (x, w, bias, initial_tail, reach)


def _backward(activation: Activation | None, kept: _Kept, to_y: Array) -> tuple[Array | None, ...]:
  x, w, bias, initial_tail, reach = kept
  batch, time, channels = x.shape
  parts = pl.cdiv(time, _TIME * _WALK)

  def floats(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, *sizes, channels), jnp.float32)

  to_x, first, to_w, to_bias = _run(
    functools.partial(_backward_kernel, activation=activation),
    (pl.cdiv(channels, _CHANNELS), parts, batch),
    [
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      floats(_TIME),
      floats(parts, w.shape[0]),
      floats(parts),
    ],
    [x, initial_tail, w, bias] + ([] if reach is None else [reach]) + [to_y],
  )
  to_tail = look_ahead_from_tail(first[:, : initial_tail.shape[1]], w, reach).astype(x.dtype)
  return to_x, jnp.sum(to_w, axis=(0, 1)), jnp.sum(to_bias, axis=(0, 1)), to_tail, None


causal_conv1d.defvjp(_forward, _backward)
