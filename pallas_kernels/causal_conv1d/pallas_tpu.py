"""Causal depthwise convolution for TPUs: Mosaic kernels over tiles of tokens and channels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.causal_conv1d.activation import Activation, activate, slope
from pallas_kernels.causal_conv1d.taps import before_tiles, look_ahead_from_tail, seen_ahead
from pallas_kernels.implementations import on_platform

Array = jax.Array
Ref = jax.Array  # A reference to a block in VMEM, read and written by index.

# Tokens and channels of a tile: some float32 arrays of this size fill a few MiB of VMEM.
_TIME = 256
_CHANNELS = 512
# Rows kept before or after a tile in VMEM: one float32 tile of sublanes.
_EDGE = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def causal_conv1d(
  x: Array,
  w: Array,
  bias: Array,
  initial_tail: Array,
  reach: Array | None,
  activation: Activation | None,
) -> Array:
  """One grid step a tile; the columns before it come along, cut out beforehand.

  The backward pass walks the tiles of a row from its end, keeps the gradients of K-1 weighted sums
  in VMEM for the tile before, and adds up the gradients of w and bias in their blocks. Only the
  arguments are kept for it. Arguments and result: see ``xla.causal_conv1d``. Reverse mode only.

  Raises:
    ValueError: neither float32 nor bfloat16, or a filter of more than 9 taps.
  """
  if x.dtype not in (jnp.float32, jnp.bfloat16) or w.dtype != jnp.float32:
    raise ValueError(
      "causal_conv1d: implementation='pallas_tpu' takes float32 or bfloat16, got x "
      f"{x.dtype} and sums in {w.dtype}; use implementation='xla'."
    )
  if w.shape[0] > _EDGE + 1:
    raise ValueError(
      f"causal_conv1d: implementation='pallas_tpu' takes K <= {_EDGE + 1} taps, got w {w.shape}; "
      "use implementation='xla'."
    )
  tiles = _tiles(x)
  arguments = [x, before_tiles(x, initial_tail, tiles.time), w, bias[None]]
  blocks = [tiles.tokens(), tiles.before(w.shape[0] - 1), tiles.taps(w.shape[0]), tiles.taps(1)]
  if reach is not None:
    arguments.append(reach[..., None])
    blocks.append(tiles.marks())

  def call(interpret: bool) -> Callable[..., Array]:
    return pl.pallas_call(
      functools.partial(_forward_kernel, activation=activation),
      grid=tiles.grid,
      in_specs=blocks,
      out_specs=tiles.tokens(),
      out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
      scratch_shapes=[pltpu.VMEM((_EDGE + tiles.time, tiles.channels), jnp.float32)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
      interpret=interpret,
    )

  return on_platform("tpu", call, *arguments)


class _Tiles(NamedTuple):
  """The grid (channels, rows, tiles of time) and the blocks of one step."""

  time: int
  channels: int
  grid: tuple[int, int, int]
  last: int | None  # the walk is from tile ``last`` to tile 0; None: from the first on

  def _place(self, step: Array) -> Array:
    return step if self.last is None else self.last - step

  def tokens(self) -> pl.BlockSpec:
    """Of [B, T, C]."""
    return pl.BlockSpec((1, self.time, self.channels), lambda c, b, t: (b, self._place(t), c))

  def marks(self) -> pl.BlockSpec:
    """Of [B, T, 1]."""
    return pl.BlockSpec((1, self.time, 1), lambda c, b, t: (b, self._place(t), 0))

  def before(self, past: int) -> pl.BlockSpec:
    """Of [B, tiles, K-1, C]."""
    return pl.BlockSpec((1, 1, past, self.channels), lambda c, b, t: (b, self._place(t), 0, c))

  def first(self, past: int) -> pl.BlockSpec:
    """Of [B, K-1, C]."""
    return pl.BlockSpec((1, past, self.channels), lambda c, b, t: (b, 0, c))

  def taps(self, rows: int) -> pl.BlockSpec:
    """Of [rows, C]."""
    return pl.BlockSpec((rows, self.channels), lambda c, b, t: (0, c))


def _tiles(x: Array, *, from_end: bool = False) -> _Tiles:
  batch, time, channels = x.shape
  tile, block = min(time, _TIME), min(channels, _CHANNELS)
  steps = pl.cdiv(time, tile)
  grid = (pl.cdiv(channels, block), batch, steps)
  return _Tiles(tile, block, grid, steps - 1 if from_end else None)


def _weighted(
  columns: Ref, w: Array, bias: Array, reach: Array | None, time: int
) -> tuple[Array, list[Array]]:
  """The sums of a tile whose columns begin after ``_EDGE`` rows, and the inputs j = 0..K-1 back."""
  past = w.shape[0] - 1
  inputs = [columns[_EDGE - j : _EDGE - j + time, :] for j in range(past + 1)]
  if reach is not None:
    inputs = [jnp.where(reach >= j, v, 0.0) for j, v in enumerate(inputs)]
  total = bias
  for k, v in enumerate(reversed(inputs)):
    total = total + w[k : k + 1] * v
  return total, inputs


def _forward_kernel(
  x: Ref, before: Ref, w: Ref, bias: Ref, *rest: Ref, activation: Activation | None
) -> None:
  *marks, y, columns = rest
  time, past = x.shape[1], before.shape[2]
  reach = marks[0][0] if marks else None
  columns[_EDGE - past : _EDGE, :] = before[0, 0].astype(jnp.float32)
  columns[_EDGE:, :] = x[0].astype(jnp.float32)
  total, _ = _weighted(columns, w[...], bias[...], reach, time)
  out = activate(total, activation)
  if reach is not None:
    out = jnp.where(reach >= 0, out, 0.0)
  y[0] = out.astype(y.dtype)


def _backward_kernel(
  x: Ref,
  before: Ref,
  w: Ref,
  bias: Ref,
  to_y: Ref,
  *rest: Ref,
  activation: Activation | None,
  time: int,
) -> None:
  *marks, to_x, first, to_w, to_bias, columns, sums = rest
  tile, past = x.shape[1], before.shape[2]
  step, steps = pl.program_id(2), pl.num_programs(2)
  new, arrived = x[0].astype(jnp.float32), to_y[0].astype(jnp.float32)
  reach = ahead = None
  if marks:
    reach, ahead = marks[0][0], marks[1][0]
    arrived = jnp.where(reach >= 0, arrived, 0.0)
  if time % tile:
    # What stands past the end may be anything.
    place = (steps - 1 - step) * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    new, arrived = (jnp.where(place < time, v, 0.0) for v in (new, arrived))
  columns[_EDGE - past : _EDGE, :] = before[0, 0].astype(jnp.float32)
  columns[_EDGE:, :] = new
  total, inputs = _weighted(columns, w[...], bias[...], reach, tile)
  to_sum = arrived * slope(total, activation)

  # After the tile stand the first sums of the one just done.
  sums[tile:, :] = jnp.where(step == 0, 0.0, sums[:_EDGE, :])
  sums[:tile, :] = to_sum
  first[0] = sums[:past, :]
  to_input = w[past:, :] * to_sum
  for j in range(1, past + 1):
    later = sums[j : j + tile, :]
    if ahead is not None:
      later = jnp.where(ahead >= j, later, 0.0)
    to_input = to_input + w[past - j : past - j + 1, :] * later
  to_x[0] = to_input.astype(to_x.dtype)

  @pl.when((step == 0) & (pl.program_id(1) == 0))
  def _() -> None:
    to_w[...] = jnp.zeros_like(to_w)
    to_bias[...] = jnp.zeros_like(to_bias)

  for j, v in enumerate(inputs):
    to_w[past - j : past - j + 1, :] += jnp.sum(to_sum * v, axis=0, keepdims=True)
  to_bias[...] += jnp.sum(to_sum, axis=0, keepdims=True)


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
  taps, past = w.shape[0], initial_tail.shape[1]
  tiles = _tiles(x, from_end=True)
  arguments = [x, before_tiles(x, initial_tail, tiles.time), w, bias[None], to_y]
  blocks = [tiles.tokens(), tiles.before(past), tiles.taps(taps), tiles.taps(1), tiles.tokens()]
  if reach is not None:
    arguments += [reach[..., None], seen_ahead(reach, past)[..., None]]
    blocks += [tiles.marks(), tiles.marks()]
  columns = (_EDGE + tiles.time, tiles.channels)

  def call(interpret: bool) -> Callable[..., list[Array]]:
    return pl.pallas_call(
      functools.partial(_backward_kernel, activation=activation, time=x.shape[1]),
      grid=tiles.grid,
      in_specs=blocks,
      out_specs=[tiles.tokens(), tiles.first(past), tiles.taps(taps), tiles.taps(1)],
      out_shape=[
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(initial_tail.shape, jnp.float32),
        jax.ShapeDtypeStruct(w.shape, jnp.float32),
        jax.ShapeDtypeStruct((1, *bias.shape), jnp.float32),
      ],
      scratch_shapes=[pltpu.VMEM(columns, jnp.float32)] * 2,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary")
      ),
      interpret=interpret,
    )

  to_x, first, to_w, to_bias = on_platform("tpu", call, *arguments)
  to_tail = look_ahead_from_tail(first, w, reach).astype(x.dtype)
  return to_x, to_w, to_bias[0], to_tail, None


causal_conv1d.defvjp(_forward, _backward)
