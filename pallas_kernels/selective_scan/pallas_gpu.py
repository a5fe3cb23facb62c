"""The selective scan for GPUs (Pallas Triton): one program a block of channels, over all of time.

A warp holds the states of its channels in registers and walks the tokens. Nothing is shared between
programs; what all channels of a group add to, the gradients of b and c, is summed outside, so that
results do not depend on the order in which programs run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.implementations import on_platform

Array = jax.Array
Ref = jax.Array  # what Pallas hands to a kernel

_CHANNELS = 32  # of a program
_WARPS = 1
# Tokens whose inputs are loaded together, before the first of them is needed.
_AHEAD = 8
# Entries of a program's states, in the registers of a warp: 64 a thread and no more.
_MAX_ENTRIES = 2048


class _Inputs(NamedTuple):
  """Whole chunks of time, channels padded group by group to whole blocks, N to a power of two."""

  x: Array  # [B, T', D'], float32 or bfloat16
  dt: Array  # [B, T', D'] float32
  a: Array  # [D', N'] float32
  b: Array  # [B, G, T', N'], float32 or bfloat16
  c: Array  # [B, G, T', N'], float32 or bfloat16
  d: Array  # [D'] float32
  state: Array  # [B, D', N'] float32
  reset: Array | None  # int32 [B, T']


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
  """The token recurrence in registers; interpreted on CPU.

  Kept for the gradient are the incoming states of the chunks; the backward kernel walks the chunks
  in reverse and computes the states of one again, into global memory, one chunk's at a time. Time
  is padded with ``dt = 0`` to a whole number of chunks, of a multiple of 8 tokens, and channels
  with zeros to multiples of 32 a group. Reverse mode only.

  Raises:
    ValueError: float64, or more state than the registers hold.
  """
  if dt.dtype != jnp.float32:
    raise ValueError(
      f"selective_scan: implementation='pallas_gpu' computes in float32, got {dt.dtype}; use "
      "implementation='xla'."
    )
  batch, time, channels = x.shape
  groups, size = b.shape[2:]
  if _CHANNELS * pl.next_power_of_2(size) > _MAX_ENTRIES:
    raise ValueError(
      f"selective_scan: implementation='pallas_gpu' holds at most {_MAX_ENTRIES // _CHANNELS} "
      f"state entries a channel in registers, got N={size}; use implementation='xla'."
    )
  chunk = pl.cdiv(min(chunk_size, time), _AHEAD) * _AHEAD
  padding = -time % chunk
  per_group = channels // groups
  width = pl.cdiv(per_group, _CHANNELS) * _CHANNELS

  def pad_time(v: Array) -> Array:
    return jnp.pad(v, [(0, 0), (0, padding)] + [(0, 0)] * (v.ndim - 2))

  def pad_channels(v: Array, axis: int) -> Array:
    """D to D' at an axis."""
    v = v.reshape(*v.shape[:axis], groups, per_group, *v.shape[axis + 1 :])
    v = jnp.pad(v, [(0, width - per_group if i == axis + 1 else 0) for i in range(v.ndim)])
    return v.reshape(*v.shape[:axis], groups * width, *v.shape[axis + 2 :])

  def pad_size(v: Array) -> Array:
    return jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, pl.next_power_of_2(size) - size)])

  inputs = _Inputs(
    x=pad_channels(pad_time(x), 2),
    dt=pad_channels(pad_time(dt), 2),
    a=pad_size(pad_channels(a, 0)),
    b=pad_size(jnp.swapaxes(pad_time(b), 1, 2)),
    c=pad_size(jnp.swapaxes(pad_time(c), 1, 2)),
    d=pad_channels(jnp.zeros((channels,), jnp.float32) if d is None else d, 0),
    state=pad_size(pad_channels(initial_state, 1)),
    reset=None if resets is None else pad_time(resets.astype(jnp.int32)),
  )
  y, state = _scan(chunk, inputs)
  y = y.reshape(batch, -1, groups, width)[:, :time, :, :per_group]
  state = state.reshape(batch, groups, width, -1)[:, :, :per_group, :size]
  return y.reshape(x.shape), state.reshape(initial_state.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(chunk: int, inputs: _Inputs) -> tuple[Array, Array]:
  """y [B, T', D'] in the dtype of x and the last state [B, D', N']."""
  return _scan_forward(chunk, inputs)[0]


def _scan_forward(chunk: int, inputs: _Inputs) -> tuple[tuple[Array, Array], tuple[_Inputs, Array]]:
  x, state = inputs.x, inputs.state
  spec = _specs(chunk, inputs)
  y, last, states = _call(
    lambda interpret: _forward_kernel,
    inputs,
    in_specs=_in_specs(spec, inputs),
    out_specs=[spec.x, spec.state, spec.states],
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
      jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // chunk, *state.shape[1:]), jnp.float32),
    ],
    name="selective_scan_forward",
  )
  return (y, last), (inputs, states)


def _scan_backward(
  chunk: int, kept: tuple[_Inputs, Array], gradients: tuple[Array, Array]
) -> tuple[_Inputs]:
  inputs, states = kept
  to_y, to_last = gradients
  x, b, state = inputs.x, inputs.b, inputs.state
  batch, time, width = x.shape
  groups, size = b.shape[1], b.shape[3]
  blocks = width // _CHANNELS
  spec = _specs(chunk, inputs)
  of_maps = pl.BlockSpec((None, None, time, size), lambda row, j: (row, j, 0, 0))
  of_row = pl.BlockSpec((None, _CHANNELS), lambda row, j: (row, j))
  met = pl.BlockSpec((None, None, chunk, _CHANNELS, size), lambda row, j: (row, j, 0, 0, 0))
  by_block = jax.ShapeDtypeStruct((batch, blocks, time, size), jnp.float32)
  to_x, to_dt, to_a, to_b, to_c, to_d, to_state, _ = _call(
    lambda interpret: functools.partial(
      _backward_kernel, barrier=_no_barrier if interpret else plgpu.debug_barrier
    ),
    inputs,
    states,
    to_y,
    to_last,
    in_specs=[*_in_specs(spec, inputs), spec.states, spec.x, spec.state],
    out_specs=[spec.x, spec.x, spec.state, of_maps, of_maps, of_row, spec.state, met],
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      jax.ShapeDtypeStruct(x.shape, jnp.float32),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
      by_block,
      by_block,
      jax.ShapeDtypeStruct((batch, width), jnp.float32),
      jax.ShapeDtypeStruct(state.shape, jnp.float32),
      jax.ShapeDtypeStruct((batch, blocks, chunk, _CHANNELS, size), jnp.float32),
    ],
    name="selective_scan_backward",
  )

  def of_groups(v: Array, dtype: jnp.dtype) -> Array:
    return jnp.sum(v.reshape(batch, groups, -1, time, size), axis=2).astype(dtype)

  to_inputs = _Inputs(
    x=to_x,
    dt=to_dt,
    a=jnp.sum(to_a, axis=0),
    b=of_groups(to_b, b.dtype),
    c=of_groups(to_c, inputs.c.dtype),
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
  state: pl.BlockSpec
  states: pl.BlockSpec
  reset: pl.BlockSpec


def _specs(chunk: int, inputs: _Inputs) -> _Specs:
  """What a program (row, block of channels) sees of the arrays: all of time."""
  batch, time, width = inputs.x.shape
  size = inputs.a.shape[1]
  of_group = width // _CHANNELS // inputs.b.shape[1]
  return _Specs(
    x=pl.BlockSpec((None, time, _CHANNELS), lambda row, j: (row, 0, j)),
    a=pl.BlockSpec((_CHANNELS, size), lambda row, j: (j, 0)),
    maps=pl.BlockSpec(
      (None, None, time, size), lambda row, j: (row, jax.lax.div(j, of_group), 0, 0)
    ),
    d=pl.BlockSpec((_CHANNELS,), lambda row, j: (j,)),
    state=pl.BlockSpec((None, _CHANNELS, size), lambda row, j: (row, j, 0)),
    states=pl.BlockSpec((None, time // chunk, _CHANNELS, size), lambda row, j: (row, 0, j, 0)),
    reset=pl.BlockSpec((None, time), lambda row, j: (row, 0)),
  )


def _in_specs(spec: _Specs, inputs: _Inputs) -> list[pl.BlockSpec]:
  specs = [spec.x, spec.x, spec.a, spec.maps, spec.maps, spec.d, spec.state]
  return specs if inputs.reset is None else [*specs, spec.reset]


def _call(
  kernel: Callable[[bool], Callable[..., None]], inputs: _Inputs, *more: Array, **options: Any
) -> list[Array]:
  """``pallas_call`` of ``kernel(interpret)``, which gets the refs of the inputs as ``_Inputs``."""
  given = [v for v in inputs if v is not None]
  count = len(given)

  def call(interpret: bool) -> Callable[..., list[Array]]:
    run = kernel(interpret)

    def body(*refs: Ref) -> None:
      run(_Inputs(*refs[:count], *[None] * (len(inputs) - count)), *refs[count:])

    return pl.pallas_call(
      body,
      grid=(inputs.x.shape[0], inputs.x.shape[2] // _CHANNELS),
      interpret=interpret,
      compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
      **options,
    )

  return on_platform("gpu", call, *given, *more)


def _no_barrier() -> None:
  """An interpreted program has no threads to wait for."""


# Below, a row is [channels], a map [N], a state [channels, N].


class _Token(NamedTuple):
  x: Array  # row
  dt: Array  # row
  b: Array  # map
  reset: Array | None  # scalar


def _tokens(inputs: _Inputs, start: Array) -> list[_Token]:
  """The next tokens; all loads stand before all work."""
  return [
    _Token(
      x=inputs.x[start + i, :].astype(jnp.float32),
      dt=inputs.dt[start + i, :],
      b=inputs.b[start + i, :].astype(jnp.float32),
      reset=None if inputs.reset is None else inputs.reset[start + i],
    )
    for i in range(_AHEAD)
  ]


def _rows(ref: Ref, start: Array) -> list[Array]:
  return [ref[start + i, :].astype(jnp.float32) for i in range(_AHEAD)]


def _update(state: Array, token: _Token, a: Array) -> tuple[Array, Array]:
  """The state that a token meets and the one that it leaves."""
  if token.reset is not None:
    state = jnp.where(token.reset != 0, 0.0, state)
  decay = jnp.exp(token.dt[:, None] * a)
  return state, decay * state + (token.dt * token.x)[:, None] * token.b[None, :]


def _forward_kernel(inputs: _Inputs, y_ref: Ref, last_ref: Ref, states_ref: Ref) -> None:
  a, d = inputs.a[...], inputs.d[...]
  chunks = states_ref.shape[0]
  tokens = y_ref.shape[0] // chunks

  def walk(index: Array, state: Array) -> Array:
    states_ref[index, :, :] = state

    def some(step: Array, state: Array) -> Array:
      start = index * tokens + step * _AHEAD
      maps = _rows(inputs.c, start)
      for i, token in enumerate(_tokens(inputs, start)):
        _, state = _update(state, token, a)
        y = jnp.sum(state * maps[i][None, :], axis=1) + d * token.x
        y_ref[start + i, :] = y.astype(y_ref.dtype)
      return state

    return jax.lax.fori_loop(0, tokens // _AHEAD, some, state)

  last_ref[...] = jax.lax.fori_loop(0, chunks, walk, inputs.state[...])


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
  met_ref: Ref,
  *,
  barrier: Callable[[], object],
) -> None:
  """``met_ref`` [Q, channels, N] is filled with the state that each token of a chunk meets."""
  a, d = inputs.a[...], inputs.d[...]
  chunks, tokens = entered_ref.shape[0], met_ref.shape[0]
  steps = tokens // _AHEAD

  def walk(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    index = chunks - 1 - step

    def forward(step: Array, state: Array) -> Array:
      start = index * tokens + step * _AHEAD
      to_y = _rows(to_y_ref, start)
      for i, token in enumerate(_tokens(inputs, start)):
        met, state = _update(state, token, a)
        met_ref[step * _AHEAD + i, :, :] = met
        to_c_ref[start + i, :] = jnp.sum(state * to_y[i][:, None], axis=0)
      return state

    def backward(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
      to_state, to_a, to_d = carry
      first = (steps - 1 - step) * _AHEAD
      start = index * tokens + first
      maps, to_y = _rows(inputs.c, start), _rows(to_y_ref, start)
      loaded = _tokens(inputs, start)
      for i in reversed(range(_AHEAD)):
        x, dt, b, reset = loaded[i]
        to_new = to_state + to_y[i][:, None] * maps[i][None, :]
        to_state = jnp.exp(dt[:, None] * a) * to_new
        to_rate = to_state * met_ref[first + i, :, :]  # the gradient of dt a; 0 at a reset
        if reset is not None:
          to_state = jnp.where(reset != 0, 0.0, to_state)
        to_input = jnp.sum(to_new * b[None, :], axis=1)
        to_x = dt * to_input + d * to_y[i]
        to_x_ref[start + i, :] = to_x.astype(to_x_ref.dtype)
        to_dt_ref[start + i, :] = x * to_input + jnp.sum(to_rate * a, axis=1)
        to_b_ref[start + i, :] = jnp.sum(to_new * (dt * x)[:, None], axis=0)
        to_a, to_d = to_a + dt[:, None] * to_rate, to_d + to_y[i] * x
      return to_state, to_a, to_d

    jax.lax.fori_loop(0, steps, forward, entered_ref[index, :, :])
    barrier()  # the threads of a warp may split a load unlike a store
    carry = jax.lax.fori_loop(0, steps, backward, carry)
    barrier()
    return carry

  zeros = jnp.zeros(a.shape, jnp.float32), jnp.zeros(d.shape, jnp.float32)
  to_state_ref[...], to_a_ref[...], to_d_ref[...] = jax.lax.fori_loop(
    0, chunks, walk, (to_last_ref[...], *zeros)
  )
