"""SSD in chunks for GPUs: a walk over the chunks for the states, then all chunks at once (Triton).

With ``s`` the running sum of ``dt a`` inside a chunk of Q tokens, S the state before the chunk and
``L_ij = exp(s_i - s_j)`` for j <= i of one sequence,

* ``S <- exp(s_Q) S + sum_j exp(s_Q - s_j) dt_j x_j b_jᵀ``: one program a head and tile of state
  columns walks over time with its part of S in registers and stores it before every chunk;
* ``y = (c bᵀ ∘ L) dt x + exp(s) S c + d x``: one program a chunk and some heads of a group, which
  share ``c bᵀ``.

The gradient is a walk backwards for the gradients of the states, then all chunks at once twice: for
x and dt, and, with fewer columns of the states at a time, for b and c, gathered over the heads of a
group. Kept are the inputs and the states before chunks. Float32 inputs are multiplied as float32,
outside the tensor cores and far from their speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.implementations import on_platform

Array = jax.Array
Ref = Any

# Finite, so that a masked exponent gives exactly 0.
_MASKED = -1e30
# Tensor cores multiply 16 x 16 at least, and Triton's arrays have powers of two as sizes.
_SMALLEST = 16
# Most tokens a chunk: the matrices of a larger one would leave the registers.
_LARGEST_CHUNK = 64
# Widest head and state for the same reason.
_LARGEST = 128
# State columns of one program of a walk: one row of Nano's 64 heads then fills 256 programs.
_COLUMNS = 32
# State columns of one program that gathers the gradients of b and c.
_MAP_COLUMNS = 64
# Heads that share a program, at most.
_HEADS = 8
# More warps would hold parts of a product twice.
_WARPS = 4


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
  """Arguments as of the other implementations; reverse mode only.

  A chunk is the power of two up to ``chunk_size`` within 16 and 64; in float32 it is 16 tokens, for
  larger products would not fit. Time is padded to whole chunks with ``dt = 0``, P and N to powers
  of two of 16 or more. Walks carry states in float32 and store them in the dtype of the products.

  Raises:
    ValueError: float64, or P or N above 128.
  """
  batch, time, heads, width = x.shape
  size = b.shape[3]
  dtype = jnp.result_type(x, b, c)
  if dtype == jnp.float64 or max(width, size) > _LARGEST:
    raise ValueError(
      f"ssd: implementation='pallas_gpu' takes float32 and bfloat16 with P and N up to {_LARGEST}, "
      f'got {dtype} with P={width}, N={size}; use implementation="xla".'
    )
  dtype = dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
  largest = _LARGEST_CHUNK if dtype == jnp.bfloat16 else _SMALLEST
  chunk = min(max(1 << (chunk_size.bit_length() - 1), _SMALLEST), largest)
  count = -(-time // chunk)

  def split(v: Array) -> Array:
    """[B, T, ...] to [B, chunks, Q, ...]; widths are padded to powers of two."""
    wide = _power_of_two(v.shape[-1]) - v.shape[-1] if v.ndim == 4 else 0
    rest = [(0, 0)] * (v.ndim - 3) + [(0, wide)] * (v.ndim > 2)
    v = jnp.pad(v, [(0, 0), (0, count * chunk - time), *rest])
    return v.reshape(batch, count, chunk, *v.shape[2:])

  chunks = _Chunks(
    x=split(x.astype(dtype)),
    dt=jnp.transpose(split(dt), (0, 3, 1, 2)),
    b=split(b.astype(dtype)),
    c=split(c.astype(dtype)),
  )
  state = jnp.pad(
    initial_state,
    [(0, 0), (0, 0), (0, _power_of_two(width) - width), (0, _power_of_two(size) - size)],
  )
  # Resets so far in the chunk: tokens of one count share a state.
  run = jnp.zeros((batch, count, chunk), jnp.int32)
  if resets is not None:
    run = jnp.cumsum(split(resets), axis=2, dtype=jnp.int32)
  d = jnp.zeros_like(a) if d is None else d
  y, state = _scan(state, chunks, run, a, d)
  y = y.reshape(batch, count * chunk, heads, -1)[:, :time, :, :width]
  return y, state[:, :, :width, :size]


def _power_of_two(size: int) -> int:
  return max(1 << (size - 1).bit_length(), _SMALLEST)


class _Chunks(NamedTuple):
  """The inputs, cut into chunks of Q tokens."""

  x: Array  # [B, chunks, Q, H, P]
  dt: Array  # [B, H, chunks, Q]
  b: Array  # [B, chunks, Q, G, N]
  c: Array  # [B, chunks, Q, G, N]


@jax.custom_vjp
def _scan(state: Array, chunks: _Chunks, run: Array, a: Array, d: Array) -> tuple[Array, Array]:
  """Outputs [B, chunks, Q, H, P] and the last state [B, H, P, N]; run is [B, chunks, Q]."""
  return _scan_forward(state, chunks, run, a, d)[0]


_Kept = tuple[Array, _Chunks, Array, Array, Array]  # states before chunks, the inputs, run, a, d


def _scan_forward(
  state: Array, chunks: _Chunks, run: Array, a: Array, d: Array
) -> tuple[tuple[Array, Array], _Kept]:
  sizes, total = _Sizes.of(chunks), _running_sums(chunks.dt, run, a)
  walk, all_chunks = _walk_specs(sizes), _chunk_specs(sizes)
  states, last = _call(
    _states_kernel,
    walk,
    [
      (chunks.x, walk.x),
      (chunks.dt, walk.dt),
      (total, walk.dt),
      (chunks.b, walk.maps),
      (run, walk.run),
      (state, walk.state),
    ],
    [(sizes.states(chunks.x.dtype), walk.states), (state, walk.state)],
    stages=3,
  )
  (y,) = _call(
    _outputs_kernel,
    all_chunks,
    [*_inputs(all_chunks, chunks, run, total, d), (states, all_chunks.states)],
    [(chunks.x, all_chunks.x)],
    stages=2,
  )
  return (y, last), (states, chunks, run, a, d)


def _scan_backward(
  kept: _Kept, gradients: tuple[Array, Array]
) -> tuple[Array, _Chunks, None, Array, Array]:
  states, chunks, run, a, d = kept
  to_y, to_last = gradients
  sizes, total = _Sizes.of(chunks), _running_sums(chunks.dt, run, a)
  walk, all_chunks = _walk_specs(sizes), _chunk_specs(sizes)
  to_states, to_first = _call(
    _to_states_kernel,
    walk,
    [
      (to_y, walk.x),
      (total, walk.dt),
      (chunks.c, walk.maps),
      (run, walk.run),
      (to_last, walk.state),
    ],
    [(states, walk.states), (to_last, walk.state)],
    stages=3,
  )
  to_x, to_scale, to_rate, to_products = _call(
    _to_inputs_kernel,
    all_chunks,
    [
      *_inputs(all_chunks, chunks, run, total, d),
      (states, all_chunks.states),
      (to_states, all_chunks.states),
      (to_y, all_chunks.x),
    ],
    [
      (chunks.x, all_chunks.x),
      *[(chunks.dt, all_chunks.dt)] * 2,
      (sizes.products(), all_chunks.products),
    ],
    # Deeper, a program of bfloat16 would have the shared memory alone; in float32 the compiler
    # keeps more in registers with a pipeline than without.
    stages=1 if chunks.x.dtype == jnp.bfloat16 else 2,
  )
  groups = _group_specs(sizes)
  to_products = to_products.reshape(*chunks.b.shape[:2], chunks.b.shape[3], -1, *[sizes.chunk] * 2)
  to_b, to_c, through, to_d = _call(
    _to_maps_kernel,
    groups,
    [
      (chunks.x, groups.x),
      (chunks.dt, groups.dt),
      (total, groups.dt),
      (chunks.b, groups.maps),
      (chunks.c, groups.maps),
      (run, groups.run),
      (states, groups.states),
      (to_states, groups.states),
      (to_y, groups.x),
      (jnp.sum(to_products, axis=3), groups.products),
    ],
    [
      *[(chunks.b, groups.maps)] * 2,
      *[(sizes.sums(), groups.sums)] * 2,
    ],
    stages=3,
  )
  to_rate += jnp.sum(through, axis=1)[..., None]
  to_dt = to_scale + a[:, None, None] * to_rate
  to_chunks = _Chunks(x=to_x, dt=to_dt, b=to_b, c=to_c)
  to_a = jnp.sum(to_rate * chunks.dt, axis=(0, 2, 3))
  return to_first, to_chunks, None, to_a, jnp.sum(to_d[:, 0], axis=(0, 2))


_scan.defvjp(_scan_forward, _scan_backward)


def _running_sums(dt: Array, run: Array, a: Array) -> Array:
  """Of ``dt a`` inside the chunks, [B, H, chunks, Q]; they start anew at a reset."""
  place = jnp.arange(dt.shape[3])
  seen = (place[:, None] >= place) & (run[..., :, None] == run[..., None, :])
  return jnp.einsum(
    "zcij,zhcj->zhci",
    seen.astype(jnp.float32),
    a[:, None, None] * dt,
    precision=jax.lax.Precision.HIGHEST,
  )


class _Sizes(NamedTuple):
  """Of the arrays, and how heads are dealt to programs."""

  batch: int
  number: int  # of chunks
  chunk: int
  heads: int
  width: int
  size: int
  per_group: int  # heads
  together: int  # heads of one program, all of one group

  @classmethod
  def of(cls, chunks: _Chunks) -> _Sizes:
    batch, number, chunk, heads, width = chunks.x.shape
    groups, size = chunks.b.shape[3:]
    per_group = heads // groups
    together = max(n for n in range(1, _HEADS + 1) if per_group % n == 0)
    return cls(batch, number, chunk, heads, width, size, per_group, together)

  def states(self, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    shape = (self.batch, self.number, self.heads, self.width, self.size)
    return jax.ShapeDtypeStruct(shape, dtype)

  def sums(self) -> jax.ShapeDtypeStruct:
    tiles = self.size // min(_MAP_COLUMNS, self.size)
    return jax.ShapeDtypeStruct((self.batch, tiles, self.heads, self.number), jnp.float32)

  def products(self) -> jax.ShapeDtypeStruct:
    parts = self.heads // self.together
    shape = (self.batch, self.number, parts, self.chunk, self.chunk)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class _WalkSpecs(NamedTuple):
  """What a program (head, tile of state columns, row) sees: all of time."""

  grid: tuple[int, ...]
  x: pl.BlockSpec  # [chunks, Q, P]
  dt: pl.BlockSpec  # [chunks, Q], of its running sums too
  maps: pl.BlockSpec  # [chunks, Q, tile], of b and c
  run: pl.BlockSpec  # [chunks, Q]
  state: pl.BlockSpec  # [P, tile]
  states: pl.BlockSpec  # [chunks, P, tile]


def _walk_specs(sizes: _Sizes) -> _WalkSpecs:
  n, q, p, share = sizes.number, sizes.chunk, sizes.width, sizes.per_group
  tile = min(_COLUMNS, sizes.size)
  return _WalkSpecs(
    grid=(sizes.heads, sizes.size // tile, sizes.batch),
    x=pl.BlockSpec((None, n, q, None, p), lambda h, t, z: (z, 0, 0, h, 0)),
    dt=pl.BlockSpec((None, None, n, q), lambda h, t, z: (z, h, 0, 0)),
    maps=pl.BlockSpec((None, n, q, None, tile), lambda h, t, z: (z, 0, 0, h // share, t)),
    run=pl.BlockSpec((None, n, q), lambda h, t, z: (z, 0, 0)),
    state=pl.BlockSpec((None, None, p, tile), lambda h, t, z: (z, h, 0, t)),
    states=pl.BlockSpec((None, n, None, p, tile), lambda h, t, z: (z, 0, h, 0, t)),
  )


class _ChunkSpecs(NamedTuple):
  """What a program over chunks sees: some heads of a group, in one chunk of one row."""

  grid: tuple[int, ...]
  x: pl.BlockSpec  # [Q, heads, P]
  dt: pl.BlockSpec  # [heads, Q], of its running sums and gradients too
  head: pl.BlockSpec  # [heads]
  maps: pl.BlockSpec  # [Q, N or a tile of it], of b and c
  products: pl.BlockSpec  # [Q, Q], of the gradient of c bᵀ
  run: pl.BlockSpec  # [Q]
  states: pl.BlockSpec  # [heads, P, N or a tile of it]
  sums: pl.BlockSpec  # [heads], over a chunk and tile


def _chunk_specs(sizes: _Sizes) -> _ChunkSpecs:
  """Programs (part of the heads, chunk, row)."""
  q, p, n, h = sizes.chunk, sizes.width, sizes.size, sizes.together
  share = sizes.per_group // h
  return _ChunkSpecs(
    grid=(sizes.heads // h, sizes.number, sizes.batch),
    x=pl.BlockSpec((None, None, q, h, p), lambda k, i, z: (z, i, 0, k, 0)),
    dt=pl.BlockSpec((None, h, None, q), lambda k, i, z: (z, k, i, 0)),
    head=pl.BlockSpec((h,), lambda k, i, z: (k,)),
    maps=pl.BlockSpec((None, None, q, None, n), lambda k, i, z: (z, i, 0, k // share, 0)),
    products=pl.BlockSpec((None, None, None, q, q), lambda k, i, z: (z, i, k, 0, 0)),
    run=pl.BlockSpec((None, None, q), lambda k, i, z: (z, i, 0)),
    states=pl.BlockSpec((None, None, h, p, n), lambda k, i, z: (z, i, k, 0, 0)),
    sums=pl.BlockSpec((None, None, h, None), lambda k, i, z: (z, 0, k, i)),
  )


def _group_specs(sizes: _Sizes) -> _ChunkSpecs:
  """Programs (group and tile of state columns, chunk, row), with all heads of the group."""
  q, p, h = sizes.chunk, sizes.width, sizes.per_group
  tile = min(_MAP_COLUMNS, sizes.size)
  tiles = sizes.size // tile
  return _ChunkSpecs(
    grid=(sizes.heads // h * tiles, sizes.number, sizes.batch),
    x=pl.BlockSpec((None, None, q, h, p), lambda k, i, z: (z, i, 0, k // tiles, 0)),
    dt=pl.BlockSpec((None, h, None, q), lambda k, i, z: (z, k // tiles, i, 0)),
    head=pl.BlockSpec((h,), lambda k, i, z: (k // tiles,)),
    maps=pl.BlockSpec(
      (None, None, q, None, tile), lambda k, i, z: (z, i, 0, k // tiles, k % tiles)
    ),
    products=pl.BlockSpec((None, None, None, q, q), lambda k, i, z: (z, i, k // tiles, 0, 0)),
    run=pl.BlockSpec((None, None, q), lambda k, i, z: (z, i, 0)),
    states=pl.BlockSpec((None, None, h, p, tile), lambda k, i, z: (z, i, k // tiles, 0, k % tiles)),
    sums=pl.BlockSpec((None, None, h, None), lambda k, i, z: (z, k % tiles, k // tiles, i)),
  )


def _inputs(
  specs: _ChunkSpecs, chunks: _Chunks, run: Array, total: Array, d: Array
) -> list[tuple[Array, pl.BlockSpec]]:
  """What both kernels over all chunks read first."""
  return [
    (chunks.x, specs.x),
    (chunks.dt, specs.dt),
    (total, specs.dt),
    (chunks.b, specs.maps),
    (chunks.c, specs.maps),
    (d, specs.head),
    (run, specs.run),
  ]


def _call(
  kernel: Callable[..., None],
  specs: _WalkSpecs | _ChunkSpecs,
  inputs: list[tuple[Array, pl.BlockSpec]],
  outputs: list[tuple[Any, pl.BlockSpec]],
  stages: int,
) -> list[Array]:
  """Runs a kernel.

  Args:
    outputs: arrays or shapes like them.
    stages: depth of the pipeline of its loop: as deep as leaves the shared memory of an H100 to
      two programs or more.
  """

  def call(interpret: bool) -> Callable[..., list[Array]]:
    return pl.pallas_call(
      kernel,
      grid=specs.grid,
      in_specs=[spec for _, spec in inputs],
      out_specs=[spec for _, spec in outputs],
      out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype) for v, _ in outputs],
      compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=stages),
      interpret=interpret,
    )

  return on_platform("gpu", call, *[v for v, _ in inputs])


# The kernels. Axes of matrices: i, j tokens of a chunk; p width; n state size.


def _states_kernel(
  x_ref: Ref,
  dt_ref: Ref,
  total_ref: Ref,
  b_ref: Ref,
  run_ref: Ref,
  first_ref: Ref,
  states_ref: Ref,
  last_ref: Ref,
) -> None:
  """The walk: states before the chunks, and after the last."""
  end = dt_ref.shape[1] - 1

  def step(i: Array, state: Array) -> Array:
    states_ref[i] = state.astype(states_ref.dtype)
    dt = dt_ref[i]
    decays = _decays(total_ref[i], total_ref[i, end], run_ref[i], run_ref[i, end])
    x = ((decays.leaving * dt)[:, None] * x_ref[i]).astype(x_ref.dtype)
    return decays.kept * state + _dot(x, b_ref[i], 0, 0)

  last_ref[...] = jax.lax.fori_loop(0, dt_ref.shape[0], step, first_ref[...])


def _to_states_kernel(
  to_y_ref: Ref,
  total_ref: Ref,
  c_ref: Ref,
  run_ref: Ref,
  to_last_ref: Ref,
  to_states_ref: Ref,
  to_first_ref: Ref,
) -> None:
  """The walk back: gradients of the states after the chunks, and of the first."""
  number, end = total_ref.shape[0], total_ref.shape[1] - 1

  def step(back: Array, to_state: Array) -> Array:
    i = number - 1 - back
    to_states_ref[i] = to_state.astype(to_states_ref.dtype)
    decays = _decays(total_ref[i], total_ref[i, end], run_ref[i], run_ref[i, end])
    to_y = (decays.entering[:, None] * to_y_ref[i]).astype(to_y_ref.dtype)
    return decays.kept * to_state + _dot(to_y, c_ref[i], 0, 0)

  to_first_ref[...] = jax.lax.fori_loop(0, number, step, to_last_ref[...])


def _outputs_kernel(
  x_ref: Ref,
  dt_ref: Ref,
  total_ref: Ref,
  b_ref: Ref,
  c_ref: Ref,
  d_ref: Ref,
  run_ref: Ref,
  states_ref: Ref,
  y_ref: Ref,
) -> None:
  """Outputs of a chunk from the states before it."""
  c = c_ref[...]
  products = _dot(c, b_ref[...], 1, 1)

  def head(h: Array, _: None) -> None:
    x, total, run = x_ref[:, h], total_ref[h], run_ref[...]
    mixing = products * _pair_decays(total, run) * dt_ref[h][None, :]
    y = _dot(mixing.astype(x.dtype), x, 1, 0) + d_ref[h] * x
    entering = jnp.exp(jnp.where(run == 0, total, _MASKED))
    y += entering[:, None] * _dot(c, states_ref[h], 1, 1)
    y_ref[:, h] = y.astype(y_ref.dtype)

  jax.lax.fori_loop(0, dt_ref.shape[0], head, None)


def _to_inputs_kernel(
  x_ref: Ref,
  dt_ref: Ref,
  total_ref: Ref,
  b_ref: Ref,
  c_ref: Ref,
  d_ref: Ref,
  run_ref: Ref,
  states_ref: Ref,
  to_states_ref: Ref,
  to_y_ref: Ref,
  to_x_ref: Ref,
  to_scale_ref: Ref,
  to_rate_ref: Ref,
  to_products_ref: Ref,
) -> None:
  """Gradients of x, of dt as a scale of x, of ``log a_t = dt a`` and of ``c bᵀ``.

  The gradient of ``log a_t`` is a sum of what token t passes on from those before it to itself and
  those after: pairs inside the chunk, the incoming state at i >= t, tokens j < t in the outgoing
  state, and (elsewhere) the incoming state in the outgoing one. No large sums are subtracted.
  """
  b, c, dtype = b_ref[...], c_ref[...], b_ref.dtype
  end, place = run_ref.shape[0] - 1, jnp.arange(run_ref.shape[0])
  earlier = place[:, None] < place[None, :]
  products = _dot(c, b, 1, 1)

  def head(h: Array, to_products: Array) -> Array:
    to_y, total, run = to_y_ref[:, h], total_ref[h], run_ref[...]
    decays = _decays(total, total_ref[h, end], run, run_ref[end])
    from_state = decays.entering * jnp.sum(_dot(c, states_ref[h], 1, 1) * to_y, axis=1)
    to_input = decays.leaving[:, None] * _dot(b, to_states_ref[h], 1, 1)

    x, dt = x_ref[:, h], dt_ref[h]
    into_state = dt * jnp.sum(to_input * x, axis=1)
    pair_decays = _pair_decays(total, run)
    to_input += _dot((products * pair_decays).astype(dtype), to_y, 0, 0)
    to_scale_ref[h] = jnp.sum(to_input * x, axis=1)
    to_x_ref[:, h] = (dt[:, None] * to_input + d_ref[h] * to_y).astype(dtype)

    to_mixing = _dot(to_y, x, 1, 1) * dt[None, :] * pair_decays
    pairs = to_mixing * products
    # Row i, column t: what the output at i has from tokens before t.
    before = _dot(pairs.astype(dtype), earlier.astype(dtype), 1, 0) + from_state[:, None]
    passed = jnp.where(earlier, into_state[:, None], before)
    to_rate_ref[h] = jnp.sum(passed, axis=0)
    return to_products + to_mixing

  heads = dt_ref.shape[0]
  to_products_ref[...] = jax.lax.fori_loop(0, heads, head, jnp.zeros_like(products))


def _to_maps_kernel(
  x_ref: Ref,
  dt_ref: Ref,
  total_ref: Ref,
  b_ref: Ref,
  c_ref: Ref,
  run_ref: Ref,
  states_ref: Ref,
  to_states_ref: Ref,
  to_y_ref: Ref,
  to_products_ref: Ref,
  to_b_ref: Ref,
  to_c_ref: Ref,
  through_ref: Ref,
  to_d_ref: Ref,
) -> None:
  """Gradients of b and c, gathered over the heads of the group, and of d.

  Also what the incoming state in the outgoing one adds to every ``log a_t`` of the chunk.
  """
  dtype, end = b_ref.dtype, run_ref.shape[0] - 1

  def head(h: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    to_b, to_c = carry
    run = run_ref[...]
    decays = _decays(total_ref[h], total_ref[h, end], run, run_ref[end])
    x, to_y = x_ref[:, h].astype(jnp.float32), to_y_ref[:, h]
    to_d_ref[h] = jnp.sum(x * to_y)
    state, to_state = states_ref[h], to_states_ref[h]
    inputs = ((decays.leaving * dt_ref[h])[:, None] * x).astype(dtype)
    to_b += _dot(inputs, to_state, 1, 0)
    to_c += _dot((decays.entering[:, None] * to_y).astype(dtype), state, 1, 0)
    through_ref[h] = decays.kept * jnp.sum(state.astype(jnp.float32) * to_state)
    return to_b, to_c

  zeros = jnp.zeros(b_ref.shape, jnp.float32)
  to_b, to_c = jax.lax.fori_loop(0, dt_ref.shape[0], head, (zeros, zeros))
  to_products = to_products_ref[...].astype(dtype)
  to_b_ref[...] = (to_b + _dot(to_products, c_ref[...], 0, 0)).astype(dtype)
  to_c_ref[...] = (to_c + _dot(to_products, b_ref[...], 1, 0)).astype(dtype)


class _Decays(NamedTuple):
  """How much of what is left where; exactly 0 across a reset."""

  entering: Array  # [Q] of the incoming state at each token
  leaving: Array  # [Q] of each token in the outgoing state
  kept: Array  # [] of the incoming state in the outgoing one


def _decays(total: Array, end: Array, run: Array, last: Array) -> _Decays:
  """From the running sums [Q] and resets so far [Q], and both at the last token."""
  return _Decays(
    entering=jnp.exp(jnp.where(run == 0, total, _MASKED)),
    leaving=jnp.exp(jnp.where(run == last, end - total, _MASKED)),
    kept=jnp.exp(jnp.where(last == 0, end, _MASKED)),
  )


def _pair_decays(total: Array, run: Array) -> Array:
  """[Q, Q] of the input of token j in the output of token i."""
  place = jnp.arange(run.shape[0])
  seen = (place[:, None] >= place[None, :]) & (run[:, None] == run[None, :])
  return jnp.exp(jnp.where(seen, total[:, None] - total[None, :], _MASKED))


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
  """Product over one axis of each, accumulated in float32; float32 inputs keep their precision."""
  narrow = left.dtype == jnp.bfloat16
  return jax.lax.dot_general(
    left,
    right,
    (((left_axis,), (right_axis,)), ((), ())),
    precision=None if narrow else jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
