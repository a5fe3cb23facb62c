"""Attention over pieces for GPUs: a Triton program a block of queries and part of a group's pages.

J groups of rows, M entries of their tables, C key heads, S tokens a page, Q queries a block and key
head, K keys a tile, D and V widths of keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.implementations import on_platform
from pallas_kernels.kv_packet.rotary import Rotary, factors
from pallas_kernels.kv_packet.sums import Sums, over_tables, seen_first
from pallas_kernels.paged_attention.pallas_gpu import (
  MASKED,
  WIDEST,
  block_sizes,
  cuts,
  dot,
  parts_of,
)

Array = jax.Array
Ref = Any


class _Sizes(NamedTuple):
  """Static sizes of a call."""

  groups: int  # J
  entries: int  # M
  blocks: int  # of the queries of a group and key head
  queries: int  # Q of a block, a power of two
  parts: int  # of a group's pages
  kv_heads: int
  page: int  # S
  tile: int  # K
  key_cuts: tuple[tuple[int, int], ...]  # begin and size of pieces of D, in powers of two
  value_cuts: tuple[tuple[int, int], ...]  # of V
  width: int  # D
  value_dim: int  # V
  apart: bool  # values have a pool of their own
  pairs: tuple[int, int, bool] | None  # first turned channel, number of pairs, interleaved
  scale: float
  window: int | None


def packet_attention(
  query: Array,
  keys: Array,
  values: Array | None,
  key_scales: Array | None,
  value_scales: Array | None,
  tables: Sequence[Any],
  starts: Array,
  counts: Array,
  scale: float,
  window: int | None,
  value_dim: int,
  rotary: Rotary | None,
) -> Array:
  """Programs (block and part, key head, group), each with a running maximum and sum over tiles.

  A tile is looked up token by token, so pages may have any size; its keys are turned in registers,
  with each channel's partner read a second time. Entries that a group does not see are sorted away
  before, and what is left of its table is cut into parts.

  Raises:
    ValueError: what ``refusal`` says.
  """
  del key_scales, value_scales
  refused = refusal(query, keys, value_dim)
  if refused is not None:
    raise ValueError(refused)

  def over(query: Array, at: Array, table: Any) -> Sums:
    sizes = _sizes(query, keys, values, table, scale, window, value_dim, rotary)
    pages, number = seen_first(table, at, window)
    length = sizes.blocks * sizes.queries
    spare = length - query.shape[2]
    width = sum(sizes.key_cuts[-1])
    query = jnp.pad(query, ((0, 0), (0, 0), (0, spare), (0, width - sizes.width)))
    at = jnp.pad(at, ((0, 0), (0, spare)), constant_values=-1)
    arrays = [*pages[:3], number[:, None], at, query, keys]
    if values is not None:
      arrays.append(values)
    if rotary is not None:
      arrays += factors(pages.turns, rotary, sizes.width)
    out, top, total = on_platform("gpu", functools.partial(_call, sizes), *arrays)
    highest = jnp.max(top, axis=1, keepdims=True)
    weights = jnp.exp(top - highest)
    return Sums(
      highest[:, 0, :, : length - spare, None],
      jnp.sum(total * weights, axis=1)[:, :, : length - spare, None],
      jnp.sum(out * weights[..., None], axis=1)[:, :, : length - spare, :value_dim],
    )

  return over_tables(query, keys.shape[1], tables, starts, counts, over)


def refusal(query: Any, keys: Any, value_dim: int) -> str | None:
  """Why the kernel does not take arrays of these shapes and dtypes; None where it does.

  It takes queries and pools in float32 or bfloat16, and D and V up to 1,024.
  """
  width, narrow = query.shape[3], keys.dtype.itemsize == 1
  if query.dtype not in (jnp.float32, jnp.bfloat16) or narrow or max(width, value_dim) > WIDEST:
    return (
      "packet_attention: implementation='pallas_gpu' takes queries and pools in float32 or "
      f"bfloat16 and widths up to {WIDEST}; got {query.dtype}, {keys.dtype}, D={width} and "
      f"V={value_dim}; use implementation='xla'."
    )
  return None


def _sizes(
  query: Array,
  keys: Array,
  values: Array | None,
  table: Any,
  scale: float,
  window: int | None,
  value_dim: int,
  rotary: Rotary | None,
) -> _Sizes:
  groups, kv_heads, number, width = query.shape
  entries, page = table.pages.shape[1], keys.shape[2]
  queries, tile = block_sizes(query, number, value_dim)
  blocks = -(-number // queries)
  pairs = None
  if rotary is not None:
    pairs = (rotary.first, len(rotary.frequencies), rotary.interleaved)
  return _Sizes(
    groups=groups,
    entries=entries,
    blocks=blocks,
    queries=queries,
    parts=parts_of(groups * kv_heads * blocks, -(-entries * page // tile)),
    kv_heads=kv_heads,
    page=page,
    tile=tile,
    key_cuts=cuts(width),
    value_cuts=cuts(value_dim),
    width=width,
    value_dim=value_dim,
    apart=values is not None,
    pairs=pairs,
    scale=scale,
    window=window,
  )


def _call(sizes: _Sizes, interpret: bool) -> Callable[..., list[Array]]:
  """The kernel over three columns of a table, numbers, positions, queries, pools and factors."""
  value_width = sum(sizes.value_cuts[-1])
  lead = (sizes.groups, sizes.parts, sizes.kv_heads, sizes.blocks * sizes.queries)
  parts = sizes.parts

  def whole(v: Array) -> pl.BlockSpec:
    return pl.BlockSpec(v.shape, lambda j, c, g: (0,) * v.ndim)

  def of_group(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda j, c, g: (g, *(0,) * len(shape)))

  def call(*arrays: Array) -> list[Array]:
    block = (None, None, None, sizes.queries)
    wide = pl.BlockSpec((*block, value_width), lambda j, c, g: (g, j % parts, c, j // parts, 0))
    narrow = pl.BlockSpec(block, lambda j, c, g: (g, j % parts, c, j // parts))
    at = pl.BlockSpec((None, sizes.queries), lambda j, c, g: (g, j // parts))
    query = pl.BlockSpec(
      (None, None, sizes.queries, arrays[5].shape[-1]), lambda j, c, g: (g, c, j // parts, 0)
    )
    table, pools = [of_group(sizes.entries)] * 3, arrays[6 : 7 + sizes.apart]
    turns = [of_group(sizes.entries, sizes.width)] * (0 if sizes.pairs is None else 2)
    return pl.pallas_call(
      functools.partial(_kernel, sizes),
      grid=(sizes.blocks * parts, sizes.kv_heads, sizes.groups),
      in_specs=[*table, of_group(1), at, query, *map(whole, pools), *turns],
      out_specs=[wide, narrow, narrow],
      out_shape=[
        jax.ShapeDtypeStruct((*lead, value_width), jnp.float32),
        *[jax.ShapeDtypeStruct(lead, jnp.float32)] * 2,
      ],
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
      name="packet_attention",
      interpret=interpret,
    )(*arrays)

  return call


def _kernel(
  sizes: _Sizes,
  pages_ref: Ref,
  firsts_ref: Ref,
  valid_ref: Ref,
  number_ref: Ref,
  at_ref: Ref,
  query_ref: Ref,
  key_ref: Ref,
  *refs: Ref,
) -> None:
  """refs: values if they are apart, factors of turned keys, the output, its maxima and sums."""
  part, head = jax.lax.rem(pl.program_id(0), sizes.parts), pl.program_id(1)
  value_ref = refs[0] if sizes.apart else key_ref
  turns, outs = refs[sizes.apart : -3], refs[-3:]
  at = at_ref[...]
  newest = jnp.max(at)
  oldest = jnp.min(jnp.where(at < 0, 2**30, at))
  tiles = pl.cdiv(number_ref[0] * sizes.page, sizes.tile)
  each = pl.cdiv(tiles, sizes.parts)
  stop = jnp.minimum((part + 1) * each, tiles)

  def step(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    highest, total, sums = carry
    place = i * sizes.tile + jnp.arange(sizes.tile)
    inside = place < number_ref[0] * sizes.page
    entry, slot = jnp.where(inside, place // sizes.page, 0), place % sizes.page
    page = triton.load(pages_ref.at[entry])
    position = triton.load(firsts_ref.at[entry]) + slot
    live = inside & (slot < triton.load(valid_ref.at[entry])) & (position <= newest)
    if sizes.window is not None:
      live &= position > oldest - sizes.window

    def held(ref: Ref, column: Array, width: int) -> Array:
      """Columns [K, size] of a pool; zeros for what is not seen, which is not read."""
      shape = sizes.tile, column.shape[0]
      mask = jnp.broadcast_to(live[:, None] & (column < width)[None, :], shape)
      # Arrays alone, or scalars: the interpreter knows no slices beside them.
      index = [jnp.broadcast_to(v, shape) for v in (page[:, None], slot[:, None], column[None, :])]
      at = ref.at[index[0], head, index[1], index[2]]
      return triton.load(at, mask=mask, other=jnp.zeros((), ref.dtype))

    scores = jnp.zeros((sizes.queries, sizes.tile), jnp.float32)
    for cut in sizes.key_cuts:
      key = _turned(sizes, held, key_ref, cut, entry, turns)
      scores += dot(query_ref[:, pl.ds(*cut)], key, 1)
    back = at[:, None] - position[None, :]
    seen = (back >= 0) & live[None, :]
    if sizes.window is not None:
      seen &= back < sizes.window
    scores = jnp.where(seen, scores * sizes.scale, MASKED)
    top = jnp.maximum(highest, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
    shrink = jnp.exp(highest - top)
    total = total * shrink + jnp.sum(weights, axis=1)
    weights = weights.astype(query_ref.dtype)

    def joined(cut: tuple[int, int], out: Array) -> Array:
      piece = held(value_ref, cut[0] + jnp.arange(cut[1]), sizes.value_dim)
      return out * shrink[:, None] + dot(weights, piece, 0)

    return top, total, tuple(map(joined, sizes.value_cuts, sums))

  top, total, sums = jax.lax.fori_loop(
    part * each,
    stop,
    step,
    (
      jnp.full((sizes.queries,), MASKED, jnp.float32),
      jnp.zeros((sizes.queries,), jnp.float32),
      tuple(jnp.zeros((sizes.queries, size), jnp.float32) for _, size in sizes.value_cuts),
    ),
  )
  for cut, out in zip(sizes.value_cuts, sums, strict=True):
    outs[0][:, pl.ds(*cut)] = out
  outs[1][...], outs[2][...] = top, total


def _turned(
  sizes: _Sizes,
  held: Callable[[Ref, Array, int], Array],
  key_ref: Ref,
  cut: tuple[int, int],
  entry: Array,
  turns: Sequence[Ref],
) -> Array:
  """A piece of the keys of a tile, turned on where it has turned channels."""
  begin, size = cut
  column = begin + jnp.arange(size)
  key = held(key_ref, column, sizes.width)
  if sizes.pairs is None:
    return key
  first, number, interleaved = sizes.pairs
  if begin >= first + 2 * number or begin + size <= first:
    return key
  inside = (column >= first) & (column < first + 2 * number)
  if interleaved:
    one = (column - first) % 2 == 0
    other = jnp.where(one, column + 1, column - 1)
  else:
    one = column < first + number
    other = jnp.where(one, column + number, column - number)
  partner = held(key_ref, jnp.where(inside, other, column), sizes.width).astype(jnp.float32)
  partner = jnp.where(one[None, :], -partner, partner)
  shape = key.shape
  index = [jnp.broadcast_to(v, shape) for v in (entry[:, None], column[None, :])]
  mask = jnp.broadcast_to((column < sizes.width)[None, :], shape)
  cos, sin = (triton.load(ref.at[index[0], index[1]], mask=mask, other=0.0) for ref in turns)
  return (key.astype(jnp.float32) * cos + partner * sin).astype(key.dtype)
