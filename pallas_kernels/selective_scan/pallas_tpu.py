"""The selective scan for TPUs (Mosaic): state entries on sublanes, channels on lanes.

The work is elementwise, so it is the vector unit's. A program of the grid walks one chunk of one
block of channels; the grid's last axis goes over chunks in order, and the state stays in VMEM from
one to the next. Tokens are taken a tile of rows at a time, so that every load and store is whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementations import on_platform

Array = jax.Array
Ref = jax.Array  # what Pallas hands to a kernel

# Tokens of a tile: the sublanes of a register.
_ROWS = 8
_LANES = 128
# A backward program holds one state a token of its chunk.
_MAX_BYTES_OF_STATES = 8 * 2**20


class _Inputs(NamedTuple):
  """Whole chunks of time, channels padded group by group to whole blocks, [D'] in all."""

  x: Array  # [B, T', D'], float32 or bfloat16
  dt: Array  # [B, T', D'] float32
  a: Array  # [N, D'] float32
  b: Array  # [B, G, T', N] float32
  c: Array  # [B, G, T', N] float32
  d: Array  # [1, D'] float32
  state: Array  # [B, N, D'] float32
  reset: Array | None  # int32 [B, chunks, 1, Q]


class _Block(NamedTuple):
  """Sizes of a program's block: tokens and channels."""

  tokens: int
  channels: int


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
  """The token recurrence, a chunk a grid step; interpreted on CPU.

  Kept for the gradient are the incoming states of the chunks; the backward kernel walks the chunks
  in reverse and computes the states of one again, into VMEM. Time is padded with ``dt = 0`` to a
  whole number of chunks, of a multiple of 8 tokens, and channels with zeros to multiples of 128 a
  group. Reverse mode only.

  Raises:
    ValueError: float64, or a chunk whose states do not fit into VMEM.
  """
  if dt.dtype != jnp.float32:
    raise ValueError(
      f"selective_scan: implementation='pallas_tpu' computes in float32, got {dt.dtype}; use "
      "implementation='xla'."
    )
  batch, time, channels = x.shape
  groups, size = b.shape[2:]
  block = _block(min(chunk_size, time), channels // groups, size)
  chunks = pl.cdiv(time, block.tokens)
  padding = chunks * block.tokens - time
  width = pl.cdiv(channels // groups, block.channels) * block.channels

  def pad_time(v: Array) -> Array:
    return jnp.pad(v, [(0, 0), (0, padding)] + [(0, 0)] * (v.ndim - 2))

  def pad_channels(v: Array) -> Array:
    """[..., D] to [..., D']."""
    v = v.reshape(*v.shape[:-1], groups, channels // groups)
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, width - v.shape[-1])])
    return v.reshape(*v.shape[:-2], groups * width)

  def maps(v: Array) -> Array:
    return jnp.swapaxes(pad_time(v.astype(jnp.float32)), 1, 2)

  inputs = _Inputs(
    x=pad_channels(pad_time(x)),
    dt=pad_channels(pad_time(dt)),
    a=pad_channels(a.T),
    b=maps(b),
    c=maps(c),
    d=pad_channels((jnp.zeros((channels,), jnp.float32) if d is None else d)[None]),
    state=pad_channels(jnp.swapaxes(initial_state, 1, 2)),
    reset=None
    if resets is None
    else pad_time(resets.astype(jnp.int32)).reshape(batch, chunks, 1, block.tokens),
  )
  y, state = _scan(block, inputs)
  y = y.reshape(batch, -1, groups, width)[:, :time, :, : channels // groups]
  state = state.reshape(batch, size, groups, width)[..., : channels // groups]
  return y.reshape(x.shape), jnp.swapaxes(state.reshape(batch, size, channels), 1, 2)


def _block(chunk: int, channels: int, size: int) -> _Block:
  """Tokens rounded up to tiles, and the most lanes that divide the channels and fit into VMEM."""
  tokens = pl.cdiv(chunk, _ROWS) * _ROWS
  padded = pl.cdiv(channels, _LANES) * _LANES
  rows = pl.cdiv(size, 8) * 8
  for lanes in (512, 256, 128):
    if padded % lanes == 0 and 4 * tokens * rows * lanes <= _MAX_BYTES_OF_STATES:
      return _Block(tokens, lanes)
  raise ValueError(
    f"selective_scan: implementation='pallas_tpu' keeps chunk_size={chunk} states of N={size} "
    f"entries of 128 channels in {_MAX_BYTES_OF_STATES} bytes; use a smaller chunk_size or "
    "implementation='xla'."
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(block: _Block, inputs: _Inputs) -> tuple[Array, Array]:
  """y [B, T', D'] in the dtype of x and the last state [B, N, D']."""
  return _scan_forward(block, inputs)[0]


def _scan_forward(
  block: _Block, inputs: _Inputs
) -> tuple[tuple[Array, Array], tuple[_Inputs, Array]]:
  x, state = inputs.x, inputs.state
  chunks = x.shape[1] // block.tokens
  spec = _specs(block, inputs, lambda chunk: chunk)
  y, last, states = _call(
    _forward_kernel,
    inputs,
    grid=(x.shape[0], x.shape[2] // block.channels, chunks),
    in_specs=_in_specs(spec, inputs),
    out_specs=[spec.x, spec.state, spec.states],
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
      jax.ShapeDtypeStruct((x.shape[0], chunks, *state.shape[1:]), jnp.float32),
    ],
  )
  return (y, last), (inputs, states)


def _scan_backward(
  block: _Block, kept: tuple[_Inputs, Array], gradients: tuple[Array, Array]
) -> tuple[_Inputs]:
  inputs, states = kept
  to_y, to_last = gradients
  x, b, state = inputs.x, inputs.b, inputs.state
  chunks, blocks = x.shape[1] // block.tokens, x.shape[2] // block.channels
  groups, size = b.shape[1], b.shape[3]
  spec = _specs(block, inputs, lambda chunk: chunks - 1 - chunk)
  of_maps = pl.BlockSpec(
    (None, None, block.tokens, size), lambda row, j, chunk: (row, j, chunks - 1 - chunk, 0)
  )
  by_block = jax.ShapeDtypeStruct((x.shape[0], blocks, *b.shape[2:]), jnp.float32)
  to_x, to_dt, to_a, to_b, to_c, to_d, to_state = _call(
    _backward_kernel,
    inputs,
    states,
    to_y,
    to_last,
    grid=(x.shape[0], blocks, chunks),
    in_specs=[*_in_specs(spec, inputs), spec.states, spec.x, spec.state],
    out_specs=[spec.x, spec.x, spec.state, of_maps, of_maps, spec.row, spec.state],
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      jax.ShapeDtypeStruct(x.shape, jnp.float32),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
      by_block,
      by_block,
      jax.ShapeDtypeStruct((x.shape[0], 1, x.shape[2]), jnp.float32),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
    ],
    scratch_shapes=[pltpu.VMEM((block.tokens, size, block.channels), jnp.float32)],
  )

  def of_groups(v: Array) -> Array:
    return jnp.sum(v.reshape(x.shape[0], groups, -1, *v.shape[2:]), axis=2)

  to_inputs = _Inputs(
    x=to_x,
    dt=to_dt,
    a=jnp.sum(to_a, axis=0),
    b=of_groups(to_b),
    c=of_groups(to_c),
    d=jnp.sum(to_d, axis=0),
    state=to_state,
    reset=None,
  )
  return (to_inputs,)


_scan.defvjp(_scan_forward, _scan_backward)


class _Specs(NamedTuple):
  x: pl.BlockSpec
  a: pl.BlockSpec
  maps: pl.BlockSpec
  d: pl.BlockSpec
  row: pl.BlockSpec
  state: pl.BlockSpec
  states: pl.BlockSpec
  reset: pl.BlockSpec


def _specs(block: _Block, inputs: _Inputs, order: Callable[[Array], Array]) -> _Specs:
  """Blocks of a program (row, block of channels, step), whose chunk is ``order(step)``."""
  size, width = inputs.a.shape
  of_group = width // block.channels // inputs.b.shape[1]
  return _Specs(
    x=pl.BlockSpec((None, *block), lambda row, j, step: (row, order(step), j)),
    a=pl.BlockSpec((size, block.channels), lambda row, j, step: (0, j)),
    maps=pl.BlockSpec(
      (None, None, block.tokens, size),
      lambda row, j, step: (row, jax.lax.div(j, of_group), order(step), 0),
    ),
    d=pl.BlockSpec((1, block.channels), lambda row, j, step: (0, j)),
    row=pl.BlockSpec((None, 1, block.channels), lambda row, j, step: (row, 0, j)),
    state=pl.BlockSpec((None, size, block.channels), lambda row, j, step: (row, 0, j)),
    states=pl.BlockSpec(
      (None, None, size, block.channels), lambda row, j, step: (row, order(step), 0, j)
    ),
    reset=pl.BlockSpec(
      (None, None, 1, block.tokens),
      lambda row, j, step: (row, order(step), 0, 0),
      memory_space=pltpu.SMEM,
    ),
  )


def _in_specs(spec: _Specs, inputs: _Inputs) -> list[pl.BlockSpec]:
  specs = [spec.x, spec.x, spec.a, spec.maps, spec.maps, spec.d, spec.state]
  return specs if inputs.reset is None else [*specs, spec.reset]


def _call(
  kernel: Callable[..., None], inputs: _Inputs, *more: Array, **options: Any
) -> list[Array]:
  """``pallas_call`` of a kernel that gets the refs of the inputs as ``_Inputs``."""
  given = [v for v in inputs if v is not None]
  count = len(given)

  def body(*refs: Ref) -> None:
    kernel(_Inputs(*refs[:count], *[None] * (len(inputs) - count)), *refs[count:])

  def call(interpret: bool) -> Callable[..., list[Array]]:
    return pl.pallas_call(
      body,
      interpret=interpret,
      name=f"selective_scan{kernel.__name__.removesuffix('_kernel')}",
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary")
      ),
      **options,
    )

  return on_platform("tpu", call, *given, *more)


# Below, a tile is _ROWS tokens; a row is [1, channels], a column [N, 1], a state [N, channels].


def _columns(ref: Ref, start: Array) -> Array:
  """The maps of a tile's tokens, as columns: [N, _ROWS]."""
  return ref[pl.ds(start, _ROWS), :].T


def _update(
  state: Array, x: Array, dt: Array, a: Array, b: Array, reset: Array | None
) -> tuple[Array, Array]:
  """The state that a token meets and the one that it leaves."""
  if reset is not None:
    state = jnp.where(reset != 0, 0.0, state)
  return state, jnp.exp(dt * a) * state + b * (dt * x)


def _reset(inputs: _Inputs, token: Array) -> Array | None:
  return None if inputs.reset is None else inputs.reset[0, token]


def _forward_kernel(inputs: _Inputs, y_ref: Ref, last_ref: Ref, states_ref: Ref) -> None:
  """One chunk; ``last_ref`` is the state, in VMEM until the last chunk is done."""

  @pl.when(pl.program_id(2) == 0)
  def _() -> None:
    last_ref[...] = inputs.state[...]

  states_ref[...] = last_ref[...]
  a, d = inputs.a[...], inputs.d[...]

  def tile(index: Array, state: Array) -> Array:
    start = pl.multiple_of(index * _ROWS, _ROWS)
    here = pl.ds(start, _ROWS)
    x, dt = inputs.x[here, :].astype(jnp.float32), inputs.dt[here, :]
    b, c = _columns(inputs.b, start), _columns(inputs.c, start)
    rows = []
    for i in range(_ROWS):
      row, column = slice(i, i + 1), (slice(None), slice(i, i + 1))
      _, state = _update(state, x[row], dt[row], a, b[column], _reset(inputs, start + i))
      rows.append(jnp.sum(state * c[column], axis=0, keepdims=True))
    y_ref[here, :] = (jnp.concatenate(rows) + d * x).astype(y_ref.dtype)
    return state

  last_ref[...] = jax.lax.fori_loop(0, y_ref.shape[0] // _ROWS, tile, last_ref[...])


def _backward_kernel(
  inputs: _Inputs,
  entered_ref: Ref,
  to_y_ref: Ref,
  to_last_ref: Ref,
  to_x_ref: Ref,
  to_dt_ref: Ref,
  to_a_ref: Ref,
  to_b_ref: Ref,
  to_c_ref: Ref,
  to_d_ref: Ref,
  to_state_ref: Ref,
  states_ref: Ref,
) -> None:
  """One chunk, the last one first; sums and the gradient of the state stay in VMEM between them.

  ``states_ref`` [Q, N, channels] is filled with the state that each token meets.
  """

  @pl.when(pl.program_id(2) == 0)
  def _() -> None:
    to_state_ref[...] = to_last_ref[...]
    to_a_ref[...] = jnp.zeros_like(to_a_ref)
    to_d_ref[...] = jnp.zeros_like(to_d_ref)

  a, d = inputs.a[...], inputs.d[...]
  tiles = to_y_ref.shape[0] // _ROWS
  place = jax.lax.broadcasted_iota(jnp.int32, (a.shape[0], _ROWS), 1)

  def forward(index: Array, state: Array) -> Array:
    start = pl.multiple_of(index * _ROWS, _ROWS)
    here = pl.ds(start, _ROWS)
    x, dt = inputs.x[here, :].astype(jnp.float32), inputs.dt[here, :]
    to_y = to_y_ref[here, :].astype(jnp.float32)
    b = _columns(inputs.b, start)
    to_c = jnp.zeros(place.shape, jnp.float32)
    for i in range(_ROWS):
      row, column = slice(i, i + 1), (slice(None), slice(i, i + 1))
      met, state = _update(state, x[row], dt[row], a, b[column], _reset(inputs, start + i))
      states_ref[start + i] = met
      to_c = jnp.where(place == i, jnp.sum(state * to_y[row], axis=1, keepdims=True), to_c)
    to_c_ref[here, :] = to_c.T
    return state

  jax.lax.fori_loop(0, tiles, forward, entered_ref[...])

  def backward(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    to_state, to_a = carry
    start = pl.multiple_of((tiles - 1 - step) * _ROWS, _ROWS)
    here = pl.ds(start, _ROWS)
    x, dt = inputs.x[here, :].astype(jnp.float32), inputs.dt[here, :]
    to_y = to_y_ref[here, :].astype(jnp.float32)
    b, c = _columns(inputs.b, start), _columns(inputs.c, start)
    to_b = jnp.zeros(place.shape, jnp.float32)
    to_inputs, to_rates = [], []
    for i in reversed(range(_ROWS)):
      row, column = slice(i, i + 1), (slice(None), slice(i, i + 1))
      to_new = to_state + c[column] * to_y[row]
      to_state = jnp.exp(dt[row] * a) * to_new
      to_rate = to_state * states_ref[start + i]  # the gradient of dt a; 0 at a reset
      if inputs.reset is not None:
        to_state = jnp.where(_reset(inputs, start + i) != 0, 0.0, to_state)
      to_a = to_a + dt[row] * to_rate
      to_b = jnp.where(
        place == i, jnp.sum(to_new * (dt[row] * x[row]), axis=1, keepdims=True), to_b
      )
      to_inputs.append(jnp.sum(to_new * b[column], axis=0, keepdims=True))
      to_rates.append(jnp.sum(to_rate * a, axis=0, keepdims=True))
    to_input = jnp.concatenate(to_inputs[::-1])
    to_x_ref[here, :] = (dt * to_input + d * to_y).astype(to_x_ref.dtype)
    to_dt_ref[here, :] = x * to_input + jnp.concatenate(to_rates[::-1])
    to_b_ref[here, :] = to_b.T
    to_d_ref[...] += jnp.sum(to_y * x, axis=0, keepdims=True)
    return to_state, to_a

  to_state_ref[...], to_a_ref[...] = jax.lax.fori_loop(
    0, tiles, backward, (to_state_ref[...], to_a_ref[...])
  )
