"""Paged attention for GPUs: a Triton program a block of queries and part of the keys of its row.

JAX's own ``ops.gpu.paged_attention`` has one query a row and no window, and wants heads before
pages. This one reads the pools as they are, and only what a query sees.

R rows, C key heads, G queries a key head and token, S tokens a page, Q queries a block and key
head, K keys a tile, D and V widths of keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.implementations import on_platform
from pallas_kernels.paged_attention.layout import from_rows, to_rows

Array = jax.Array
Shaped = Array | jax.ShapeDtypeStruct
Ref = Any

# Finite: exp gives exactly 0 for what is masked.
MASKED = -1e30
# Tensor cores multiply 16 x 16 at least.
SMALLEST = 16
# Most queries a block, and most float32 numbers of its sums, which live in registers.
_QUERIES = 64
_SUMS = 8192
# Bytes of a tile of keys, of which two or three are in shared memory; ours.
_TILE_BYTES = 16384
# Programs that fill a GPU: rows are cut into parts until there are as many.
_PROGRAMS = 512
WIDEST = 1024


class _Sizes(NamedTuple):
  """Static sizes of a call."""

  rows: int
  blocks: int  # of the queries of a row and key head
  queries: int  # Q of a block, a power of two
  parts: int  # of the keys of a row
  kv_heads: int
  shared: int  # G
  page: int  # S
  pages: int  # of a row of the page table
  tile: int  # K
  key_cuts: tuple[tuple[int, int], ...]  # begin and size of pieces of D, in powers of two
  value_cuts: tuple[tuple[int, int], ...]  # of V
  width: int  # D
  value_dim: int  # V
  scale: float
  window: int | None


def paged_attention(
  query: Array,
  keys: Array,
  values: Array | None,
  key_scales: Array | None,
  value_scales: Array | None,
  page_table: Array,
  starts: Array,
  counts: Array,
  scale: float,
  window: int | None,
  value_dim: int,
) -> Array:
  """Programs (block and part, key head, row), each with a running maximum and sum over tiles.

  Where rows and heads are few, what a row holds is cut into parts of equal length, whose results
  are joined afterwards. A width that is no power of two is cut into pieces that are; one tile of
  places is looked up in the page table token by token, so that pages may have any size. Float32 is
  multiplied as float32, outside the tensor cores. On a mesh it has to stand inside
  ``jax.shard_map``, with ``check_vma=False``.

  Raises:
    ValueError: what ``refusal`` says.
  """
  refused = refusal(query, keys, values, page_table, value_dim)
  if refused is not None:
    raise ValueError(refused)
  sizes = _sizes(query, keys, page_table, scale, window, value_dim)
  widths = sum(sizes.key_cuts[-1]), sum(sizes.value_cuts[-1])
  rows = to_rows(query, sizes.kv_heads, sizes.blocks * sizes.queries, widths[0])
  arrays = [page_table, starts[:, None], counts[:, None], rows, keys]
  arrays += [v for v in (values, key_scales, value_scales) if v is not None]
  call = functools.partial(_call, sizes, query.dtype, values is not None)
  outs = on_platform("gpu", call, *arrays)
  out = _joined(*outs) if sizes.parts > 1 else outs[0][:, 0]
  return from_rows(out, query.shape[1], query.shape[2], value_dim)


def refusal(
  query: Shaped, keys: Shaped, values: Shaped | None, page_table: Shaped, value_dim: int
) -> str | None:
  """Why the kernel does not take arrays of these shapes and dtypes; None where it does.

  It takes queries in float32 or bfloat16 and D and V up to 1,024, but no pool of 8 bits of more
  than 2^31 and at most 2^32 numbers, for which Pallas computes offsets in 32 bits.
  """
  del page_table  # of any size
  width = query.shape[3]
  largest = max(keys.size, 0 if values is None else values.size)
  doubtful = keys.dtype.itemsize == 1 and 2**31 < largest <= 2**32
  if query.dtype not in (jnp.float32, jnp.bfloat16) or max(width, value_dim) > WIDEST or doubtful:
    return (
      "paged_attention: implementation='pallas_gpu' takes queries in float32 or bfloat16, widths "
      f"up to {WIDEST} and pools of 8 bits of other than 2^31 to 2^32 numbers; got {query.dtype}, "
      f"D={width}, V={value_dim} and pools of {largest} numbers; use implementation='xla'."
    )
  return None


def _sizes(
  query: Array,
  keys: Array,
  page_table: Array,
  scale: float,
  window: int | None,
  value_dim: int,
) -> _Sizes:
  rows, time, heads, width = query.shape
  kv_heads, page = keys.shape[1:3]
  shared = heads // kv_heads
  key_cuts, value_cuts = cuts(width), cuts(value_dim)
  queries, tile = block_sizes(query, time * shared, value_dim)
  blocks = -(-time * shared // queries)
  return _Sizes(
    rows=rows,
    blocks=blocks,
    queries=queries,
    parts=parts_of(rows * kv_heads * blocks, -(-page_table.shape[1] * page // tile)),
    kv_heads=kv_heads,
    shared=shared,
    page=page,
    pages=page_table.shape[1],
    tile=tile,
    key_cuts=key_cuts,
    value_cuts=value_cuts,
    width=width,
    value_dim=value_dim,
    scale=scale,
    window=window,
  )


def block_sizes(query: Shaped, number: int, value_dim: int) -> tuple[int, int]:
  """Queries of a block, of ``number`` a key head, and keys of a tile."""
  fitting = max(_SUMS // _power_of_two(value_dim), SMALLEST)
  tile = _TILE_BYTES // (query.dtype.itemsize * _power_of_two(query.shape[-1]))
  return min(_power_of_two(number), fitting, _QUERIES), min(max(tile, SMALLEST), 128)


def parts_of(programs: int, tiles: int) -> int:
  """Into how many parts ``tiles`` are cut, where uncut there would be so many programs."""
  return min(-(-_PROGRAMS // programs), tiles)


def _power_of_two(size: int) -> int:
  return max(1 << (size - 1).bit_length(), SMALLEST)


def cuts(width: int) -> tuple[tuple[int, int], ...]:
  """Begins and sizes of pieces: the powers of two of ``width``, of which the last may be larger."""
  pieces, begin = [], 0
  while begin < width:
    left = width - begin
    size = 1 << (left.bit_length() - 1)
    # A small rest is not worth a product of its own.
    size = size if size >= SMALLEST else SMALLEST
    pieces.append((begin, size))
    begin += size
  return tuple(pieces)


def _joined(out: Array, top: Array, total: Array) -> Array:
  """The softmax over all parts, of those of each: [R, parts, C, queries, ...]."""
  weights = total * jnp.exp(top - jnp.max(top, axis=1, keepdims=True))
  sums = jnp.sum(weights, axis=1)[..., None]
  out = jnp.sum(out * weights[..., None], axis=1)
  return out / jnp.where(sums > 0, sums, 1.0)


def _call(
  sizes: _Sizes, dtype: jnp.dtype, apart: bool, interpret: bool
) -> Callable[..., list[Array]]:
  """The kernel over page table, starts, counts, queries, pools and scales."""
  value_width = sum(sizes.value_cuts[-1])
  lead = (sizes.rows, sizes.parts, sizes.kv_heads, sizes.blocks * sizes.queries)

  def whole(v: Array) -> pl.BlockSpec:
    return pl.BlockSpec(v.shape, lambda j, c, r: (0,) * v.ndim)

  def of_row(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, width), lambda j, c, r: (r, 0))

  def call(*arrays: Array) -> list[Array]:
    block, parts = (None, None, None, sizes.queries), sizes.parts
    wide = pl.BlockSpec((*block, value_width), lambda j, c, r: (r, j % parts, c, j // parts, 0))
    narrow = pl.BlockSpec(block, lambda j, c, r: (r, j % parts, c, j // parts))
    query = pl.BlockSpec(
      (None, None, sizes.queries, arrays[3].shape[-1]), lambda j, c, r: (r, c, j // parts, 0)
    )
    single = sizes.parts == 1
    return pl.pallas_call(
      functools.partial(_kernel, sizes, apart),
      grid=(sizes.blocks * sizes.parts, sizes.kv_heads, sizes.rows),
      in_specs=[of_row(sizes.pages), of_row(1), of_row(1), query, *map(whole, arrays[4:])],
      out_specs=[wide] if single else [wide, narrow, narrow],
      out_shape=[
        jax.ShapeDtypeStruct((*lead, value_width), dtype if single else jnp.float32),
        *[jax.ShapeDtypeStruct(lead, jnp.float32)] * (0 if single else 2),
      ],
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
      name="paged_attention",
      interpret=interpret,
    )(*arrays)

  return call


def _kernel(
  sizes: _Sizes,
  apart: bool,
  table_ref: Ref,
  start_ref: Ref,
  count_ref: Ref,
  query_ref: Ref,
  key_ref: Ref,
  *refs: Ref,
) -> None:
  """refs: values if they are apart, scales of quantised pools, the output, its maxima and sums."""
  block = jax.lax.div(pl.program_id(0), sizes.parts)
  part = jax.lax.rem(pl.program_id(0), sizes.parts)
  head = pl.program_id(1)
  value_ref = refs[0] if apart else key_ref
  outputs = 1 if sizes.parts == 1 else 3
  scales, outs = refs[apart : len(refs) - outputs], refs[len(refs) - outputs :]

  token = (block * sizes.queries + jnp.arange(sizes.queries)) // sizes.shared
  first = block * sizes.queries // sizes.shared
  last = (block * sizes.queries + sizes.queries - 1) // sizes.shared
  real = jnp.minimum(count_ref[0], last + 1)
  at = start_ref[0] + token
  begin = 0 if sizes.window is None else jnp.maximum(start_ref[0] + first - sizes.window + 1, 0)
  end = jnp.where(real > first, start_ref[0] + real, begin)
  each = pl.cdiv(pl.cdiv(end, sizes.tile) - begin // sizes.tile, sizes.parts)
  tile = begin // sizes.tile + part * each
  stop = jnp.minimum(tile + each, pl.cdiv(end, sizes.tile))

  def step(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    highest, total, sums = carry
    place = i * sizes.tile + jnp.arange(sizes.tile)
    live = (place >= begin) & (place < end)
    entry = jnp.where(live, place // sizes.page, 0)
    page, slot = triton.load(table_ref.at[entry]), place % sizes.page

    def held(ref: Ref, cut: tuple[int, int], width: int) -> Array:
      """A piece [K, size] of a pool; zeros for what is not seen, which is not read."""
      (start, size), mask = cut, live[:, None]
      shape = sizes.tile, size
      column = start + jnp.arange(size)
      if start + size > width:
        mask &= (column < width)[None, :]
      # Arrays alone, or scalars: the interpreter knows no slices beside them.
      index = [jnp.broadcast_to(v, shape) for v in (page[:, None], slot[:, None], column[None, :])]
      piece = triton.load(
        ref.at[index[0], head, index[1], index[2]],
        mask=jnp.broadcast_to(mask, shape),
        other=jnp.zeros((), ref.dtype),
      )
      return _wide(piece, query_ref.dtype)

    scores = jnp.zeros((sizes.queries, sizes.tile), jnp.float32)
    pieces = {cut: held(key_ref, cut, sizes.width) for cut in sizes.key_cuts}
    for cut, piece in pieces.items():
      scores += dot(query_ref[:, pl.ds(*cut)], piece, 1)
    if scales:
      scores *= triton.load(scales[0].at[page, head, slot], mask=live, other=0.0)[None, :]
    back = at[:, None] - place[None, :]
    seen = (back >= 0) & live[None, :]
    if sizes.window is not None:
      seen &= back < sizes.window
    scores = jnp.where(seen, scores * sizes.scale, MASKED)
    top = jnp.maximum(highest, jnp.max(scores, axis=1))
    weights, shrink = jnp.exp(scores - top[:, None]), jnp.exp(highest - top)
    total = total * shrink + jnp.sum(weights, axis=1)
    if scales:
      weights *= triton.load(scales[1].at[page, head, slot], mask=live, other=0.0)[None, :]
    weights = weights.astype(query_ref.dtype)

    def joined(cut: tuple[int, int], out: Array) -> Array:
      piece = None if apart else pieces.get(cut)
      if piece is None:
        piece = held(value_ref, cut, sizes.value_dim)
      return out * shrink[:, None] + dot(weights, piece, 0)

    return top, total, tuple(map(joined, sizes.value_cuts, sums))

  top, total, sums = jax.lax.fori_loop(
    tile,
    stop,
    step,
    (
      jnp.full((sizes.queries,), MASKED, jnp.float32),
      jnp.zeros((sizes.queries,), jnp.float32),
      tuple(jnp.zeros((sizes.queries, size), jnp.float32) for _, size in sizes.value_cuts),
    ),
  )
  for cut, out in zip(sizes.value_cuts, sums, strict=True):
    out = out / jnp.where(total > 0, total, 1.0)[:, None]
    outs[0][:, pl.ds(*cut)] = out.astype(outs[0].dtype)
  if outputs > 1:
    outs[1][...], outs[2][...] = top, total


def _wide(v: Array, dtype: jnp.dtype) -> Array:
  """Narrow numbers in the dtype of the products, by way of float32."""
  return v if v.dtype == dtype else v.astype(jnp.float32).astype(dtype)


def dot(left: Array, right: Array, right_axis: int) -> Array:
  """Rows of ``left`` with an axis of ``right``; float32 factors keep their precision."""
  narrow = left.dtype == jnp.bfloat16
  return jax.lax.dot_general(
    left,
    right,
    (((1,), (right_axis,)), ((), ())),
    precision=None if narrow else jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
