"""Paged attention for TPUs: a Mosaic kernel that copies the pages of a row into VMEM.

Of the two kernels that JAX ships, ``paged_attention`` has no window, one query a row and heads
before pages, and ``ragged_paged_attention`` interleaves keys and values of one width and one scale
in one pool. This one reads the pools as they are.

R rows, C key heads, G queries a key head and token, S tokens a page, N pages a tile, K = N S, Q
queries a block and key head, D and V widths of keys and values.
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
from pallas_kernels.paged_attention.layout import from_rows, to_rows

Array = jax.Array
Shaped = Array | jax.ShapeDtypeStruct
Ref = Any

# Finite: exp gives exactly 0 for what is masked.
MASKED = -1e30
LANES = 128
SUBLANES = 16  # of bfloat16; twice those of float32
# Bytes of keys and values that are in flight while others are worked on.
_TILE_BYTES = 2**20
# Most tokens a tile, and most queries a block and key head: their scores are Q x K float32.
_TILE = 1024
_QUERIES = 256
# Bytes of the sums of a block.
_SUM_BYTES = 3 * 2**20
# Numbers of a page table that fit in the 1 MiB of scalar memory with all else.
_TABLE = 240 * 1024
# VMEM that every chip gives a kernel without being asked for more.
VMEM_BYTES = 16 * 2**20

NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))


class _Sizes(NamedTuple):
  """Static sizes of a call. A grid step is a row and a block of queries of every key head."""

  rows: int
  blocks: int  # of the queries of a row and key head
  queries: int  # Q of a block
  kv_heads: int
  shared: int  # G
  page: int  # S
  pages: int  # N of a tile
  tiles: int  # of a row of the page table
  width: int  # D
  value_dim: int  # V
  apart: bool  # values have a pool of their own
  scaled: bool  # pools are quantised
  scale: float
  window: int | None

  @property
  def tile(self) -> int:
    return self.pages * self.page


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
  """One grid step a row and block of queries, which walks over the tiles of pages that it sees.

  Each page of a tile, with all its key heads, is one copy; the next tile (of the next step, after
  the last) is copied while one is worked on. Pages that a block does not see are not copied. The
  page table lies in scalar memory, ``R M`` numbers. Scales of quantised pools are gathered outside.
  Half of the rows go to each core of a chip that has two. Inside ``jax.shard_map`` it needs
  ``check_vma=False``, and on a mesh it has to stand in one.

  Raises:
    ValueError: what ``refusal`` says.
  """
  refused = refusal(query, keys, values, page_table, value_dim)
  if refused is not None:
    raise ValueError(refused)
  sizes = _sizes(query, keys, values, page_table, scale, window, value_dim)
  spare = sizes.tiles * sizes.pages - page_table.shape[1]
  page_table = jnp.pad(page_table, ((0, 0), (0, spare)))
  rows = to_rows(query, sizes.kv_heads, sizes.blocks * sizes.queries, sizes.width)
  arrays = [page_table.reshape(-1), starts, counts, rows, keys]
  if values is not None:
    arrays.append(values)
  for scales in (key_scales, value_scales):
    if scales is not None:
      # [R, M, C, S] to [R, C, M S], tokens on the lanes.
      gathered = jnp.swapaxes(scales[page_table], 1, 2)
      arrays.append(gathered.reshape(sizes.rows, sizes.kv_heads, -1))
  out = on_platform("tpu", functools.partial(_call, sizes, keys.dtype, query.dtype), *arrays)
  return from_rows(out, query.shape[1], query.shape[2], value_dim)


def refusal(
  query: Shaped, keys: Shaped, values: Shaped | None, page_table: Shaped, value_dim: int
) -> str | None:
  """Why the kernel does not take arrays of these shapes and dtypes; None where it does.

  It takes queries in float32 or bfloat16, a page table of up to 245,760 numbers, and pages whose
  tokens fill the sublanes: S is a multiple of 8 in float32, 16 in bfloat16, 32 in 8 bits.
  """
  page, item = keys.shape[2], keys.dtype.itemsize
  sublanes = 8 * 4 // item
  if query.dtype not in (jnp.float32, jnp.bfloat16) or page % sublanes:
    return (
      "paged_attention: implementation='pallas_tpu' takes queries in float32 or bfloat16 and, for "
      f"pools of {item} bytes a number, pages of a multiple of {sublanes} tokens; got "
      f"{query.dtype} and {page} tokens; use implementation='xla'."
    )
  sizes = _sizes(query, keys, values, page_table, 1.0, None, value_dim)
  if sizes.rows * sizes.tiles * sizes.pages > _TABLE:
    return (
      "paged_attention: implementation='pallas_tpu' holds the page table in scalar memory, up to "
      f"{_TABLE} numbers; got {sizes.rows} rows of {page_table.shape[1]} pages; take larger pages, "
      "fewer rows a call, or implementation='xla'."
    )
  return None


def _sizes(
  query: Shaped,
  keys: Shaped,
  values: Shaped | None,
  page_table: Shaped,
  scale: float,
  window: int | None,
  value_dim: int,
) -> _Sizes:
  rows, time, heads, width = query.shape
  kv_heads, page = keys.shape[1:3]
  shared, item = heads // kv_heads, keys.dtype.itemsize
  widths = [width] if values is None else [width, value_dim]
  token_bytes = kv_heads * item * sum(map(lanes, widths))
  pages = min(max(min(_TILE_BYTES // token_bytes, _TILE) // page, 1), page_table.shape[1])
  if item == 1:  # tiles of scales begin at whole lanes
    pages = next((n for n in range(pages, 0, -1) if n * page % LANES == 0), pages)
    pages = -(-pages * page // LANES) * LANES // page
  sum_bytes = 4 * kv_heads * (-(-value_dim // LANES) + 2) * LANES
  most = max(min(_SUM_BYTES // sum_bytes, _QUERIES) // SUBLANES, 1) * SUBLANES
  queries = min(-(-time * shared // SUBLANES) * SUBLANES, most)
  return _Sizes(
    rows=rows,
    blocks=-(-time * shared // queries),
    queries=queries,
    kv_heads=kv_heads,
    shared=shared,
    page=page,
    pages=pages,
    tiles=-(-page_table.shape[1] // pages),
    width=width,
    value_dim=value_dim,
    apart=values is not None,
    scaled=item == 1,
    scale=scale,
    window=window,
  )


def _call(
  sizes: _Sizes, pool: jnp.dtype, dtype: jnp.dtype, interpret: bool
) -> Callable[..., Array]:
  """The kernel over page table [R M], starts, counts, queries, pools and scales."""
  halves = 2 if sizes.rows % 2 == 0 else 1
  block = (None, sizes.kv_heads, sizes.queries)

  def at(half: Array, row: Array, block: Array, *_: Ref) -> tuple[Array | int, ...]:
    return (half * (sizes.rows // halves) + row, 0, block, 0)

  buffers = [pltpu.VMEM((2, sizes.kv_heads, sizes.tile, sizes.width), pool)]
  if sizes.apart:
    buffers.append(pltpu.VMEM((2, sizes.kv_heads, sizes.tile, sizes.value_dim), pool))
  pools = len(buffers)
  if sizes.scaled:
    buffers += [pltpu.VMEM((2, sizes.kv_heads, sizes.tile), jnp.float32)] * 2
  sums = (sizes.kv_heads, sizes.queries)
  scratch = [
    *buffers,
    pltpu.SemaphoreType.DMA((2, len(buffers))),
    pltpu.SMEM((2,), jnp.int32),
    pltpu.VMEM((*sums, LANES), jnp.float32),
    pltpu.VMEM((*sums, LANES), jnp.float32),
    pltpu.VMEM((*sums, sizes.value_dim), jnp.float32),
  ]
  return pl.pallas_call(
    functools.partial(_kernel, sizes, pools),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(halves, sizes.rows // halves, sizes.blocks),
      in_specs=[
        pl.BlockSpec((*block, sizes.width), at),
        *[pl.BlockSpec(memory_space=pl.ANY)] * len(buffers),
      ],
      out_specs=pl.BlockSpec((*block, sizes.value_dim), at),
      scratch_shapes=scratch,
    ),
    out_shape=jax.ShapeDtypeStruct(
      (sizes.rows, sizes.kv_heads, sizes.blocks * sizes.queries, sizes.value_dim), dtype
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary"),
      vmem_limit_bytes=_vmem_bytes(sizes, pool.itemsize),
    ),
    cost_estimate=_cost(sizes, pool.itemsize, dtype.itemsize),
    name="paged_attention",
    interpret=interpret,
  )


def _cost(sizes: _Sizes, item: int, query_item: int) -> pl.CostEstimate:
  """Of rows that are full."""
  held = sizes.rows * sizes.tiles * sizes.tile
  queries = sizes.blocks * sizes.queries * sizes.kv_heads
  both = sizes.width + sizes.value_dim
  token = (sizes.width + sizes.value_dim * sizes.apart) * item + 8 * sizes.scaled
  return pl.CostEstimate(
    flops=2 * held * queries * both,
    transcendentals=held * queries,
    bytes_accessed=held * sizes.blocks * sizes.kv_heads * token
    + sizes.rows * queries * both * query_item,
  )


def _vmem_bytes(sizes: _Sizes, item: int) -> int:
  """Twice what blocks, tiles, sums and the scores of a head take, if the default is less."""
  widths = lanes(sizes.width) + lanes(sizes.value_dim) * sizes.apart
  tiles = 2 * sizes.kv_heads * sizes.tile * (widths * item + 8 * sizes.scaled)
  blocks = 2 * 4 * (lanes(sizes.width) + lanes(sizes.value_dim))
  sums = 4 * (2 * LANES + lanes(sizes.value_dim))
  work = 4 * (3 * sizes.queries * sizes.tile + sizes.tile * widths)
  return max(VMEM_BYTES, 2 * (tiles + sizes.kv_heads * sizes.queries * (blocks + sums) + work))


class _Step(NamedTuple):
  """What the queries of a grid step see of their row."""

  row: Array
  begin: Array  # first place
  end: Array  # one past the last; 0 where no query is real
  first: Array  # query of a key head

  def tiles(self, tile: int) -> tuple[Array, Array]:
    """First and one past the last tile of places."""
    return jax.lax.div(self.begin, tile), jax.lax.div(self.end + tile - 1, tile)


def _kernel(sizes: _Sizes, pools: int, table: Ref, starts: Ref, counts: Ref, *refs: Ref) -> None:
  """refs: queries, pools and scales, the output, and the scratch of ``_call``."""
  number = pools + 2 * sizes.scaled
  query_ref, sources, out_ref = refs[0], refs[1 : 1 + number], refs[1 + number]
  buffers = refs[2 + number : 2 + 2 * number]
  semaphores, state, top_ref, total_ref, sum_ref = refs[2 + 2 * number :]
  half, part, block = (pl.program_id(i) for i in range(3))
  in_half = pl.num_programs(1)

  def step_of(part: Array, block: Array) -> _Step:
    row = half * in_half + part
    token = jax.lax.div(block * sizes.queries, sizes.shared)
    after = jax.lax.div(block * sizes.queries + sizes.queries - 1, sizes.shared) + 1
    real = jnp.minimum(after, counts[row])
    back = 2**30 if sizes.window is None else sizes.window - 1
    begin = jnp.maximum(starts[row] + token - back, 0)
    end = jnp.where(real > token, starts[row] + real, 0)
    return _Step(row, jnp.where(end > 0, begin, 0), end, block * sizes.queries)

  def copies(step: _Step, i: Array, buffer: Array, act: Callable[[Any], None]) -> None:
    """Acts on the copies of what the step sees of tile i."""

    def page(n: Array, _: None) -> None:
      page_id = table[step.row * (sizes.tiles * sizes.pages) + i * sizes.pages + n]
      place = pl.ds(pl.multiple_of(n * sizes.page, sizes.page), sizes.page)
      for j in range(pools):
        target = buffers[j].at[buffer, :, place]
        act(pltpu.make_async_copy(sources[j].at[page_id], target, semaphores.at[buffer, j]))

    last = jax.lax.div(step.end - i * sizes.tile + sizes.page - 1, sizes.page)
    first = jax.lax.div(jnp.maximum(step.begin - i * sizes.tile, 0), sizes.page)
    jax.lax.fori_loop(first, jnp.minimum(last, sizes.pages), page, None)
    for j in range(pools, number):
      places = pl.ds(pl.multiple_of(i * sizes.tile, sizes.tile), sizes.tile)
      source = sources[j].at[step.row, :, places]
      act(pltpu.make_async_copy(source, buffers[j].at[buffer], semaphores.at[buffer, j]))

  def start(step: _Step, i: Array, buffer: Array) -> None:
    copies(step, i, buffer, lambda copy: copy.start())

  @pl.when((part == 0) & (block == 0))
  def _() -> None:
    state[0] = 0  # the buffer whose turn it is
    state[1] = 0  # whether the first tile of this step is being copied already

  step = step_of(part, block)
  over = block + 1 == sizes.blocks
  # Past the last step: itself, which is not started.
  final = over & (part + 1 == in_half)
  following = step_of(
    jnp.where(over & ~final, part + 1, part), jnp.where(over, jnp.where(final, block, 0), block + 1)
  )
  ahead = ~final & (following.end > 0)
  first, stop = step.tiles(sizes.tile)

  @pl.when((step.end > 0) & (state[1] == 0))
  def _() -> None:
    start(step, first, state[0])

  top_ref[...] = jnp.full_like(top_ref, MASKED)
  total_ref[...] = jnp.zeros_like(total_ref)
  sum_ref[...] = jnp.zeros_like(sum_ref)

  def tile(i: Array, buffer: Array) -> Array:
    @pl.when(i + 1 < stop)
    def _() -> None:
      start(step, i + 1, 1 - buffer)

    @pl.when((i + 1 == stop) & ahead)
    def _() -> None:
      start(following, following.tiles(sizes.tile)[0], 1 - buffer)

    copies(step, i, buffer, lambda copy: copy.wait())
    held = [ref.at[buffer] for ref in buffers]
    _join(sizes, pools, step, starts[step.row], i, query_ref, held, top_ref, total_ref, sum_ref)
    return 1 - buffer

  buffer = jax.lax.fori_loop(first, stop, tile, state[0])
  state[0] = buffer
  state[1] = ((step.end > 0) & ahead).astype(jnp.int32)

  def write(c: Array, _: None) -> None:
    total = total_ref[c][:, :1]
    out_ref[c] = (sum_ref[c] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)

  jax.lax.fori_loop(0, sizes.kv_heads, write, None)


def _join(
  sizes: _Sizes,
  pools: int,
  step: _Step,
  start: Array,
  i: Array,
  query_ref: Ref,
  held: list[Ref],
  top_ref: Ref,
  total_ref: Ref,
  sum_ref: Ref,
) -> None:
  """Adds tile i, which lies in the buffers ``held``, to the sums of all key heads."""
  begin = i * sizes.tile

  def live(axis: int) -> Array:
    """[K, 1] or [1, K]: what some query sees; the rest of a buffer may hold anything."""
    shape = (sizes.tile, 1) if axis == 0 else (1, sizes.tile)
    place = begin + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return (place >= step.begin) & (place < step.end)

  value_ref = held[pools - 1]

  if not sizes.scaled:
    # 0 * NaN would be NaN. Only tiles at the ends have such places.
    @pl.when((begin < step.begin) | (begin + sizes.tile > step.end))
    def _() -> None:
      def clear(c: Array, _: None) -> None:
        value = value_ref[c].astype(jnp.float32)
        value_ref[c] = jnp.where(live(0), value, 0.0).astype(value_ref.dtype)

      jax.lax.fori_loop(0, sizes.kv_heads, clear, None)

  shape = (sizes.queries, sizes.tile)
  query = step.first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  place = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  back = start + jax.lax.div(query, sizes.shared) - place
  seen = back >= 0
  if sizes.window is not None:
    seen &= back < sizes.window

  def head(c: Array, _: None) -> None:
    query = query_ref[c]
    scores = dot(query, _wide(held[0][c], query.dtype), NT)
    if sizes.scaled:
      scores *= held[pools][pl.ds(c, 1), :]
    scores = jnp.where(seen, scores * sizes.scale, MASKED)
    last = top_ref[c][:, :1]
    top = jnp.maximum(last, jnp.max(scores, axis=1, keepdims=True))
    weights, shrink = jnp.exp(scores - top), jnp.exp(last - top)
    total = total_ref[c][:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    top_ref[c] = jnp.broadcast_to(top, top_ref.shape[1:])
    total_ref[c] = jnp.broadcast_to(total, total_ref.shape[1:])
    value = value_ref[c] if sizes.apart else value_ref[c][:, : sizes.value_dim]
    if sizes.scaled:
      weights *= jnp.where(live(1), held[pools + 1][pl.ds(c, 1), :], 0.0)
      if value.dtype != jnp.int8:  # which has no NaN
        value = jnp.where(live(0), value.astype(jnp.float32), 0.0)
    more = dot(weights.astype(query.dtype), _wide(value, query.dtype), NN)
    sum_ref[c] = sum_ref[c] * shrink + more

  jax.lax.fori_loop(0, sizes.kv_heads, head, None)


def _wide(v: Array, dtype: jnp.dtype) -> Array:
  """Narrow numbers in the dtype of the products, by way of float32."""
  return v if v.dtype == dtype else v.astype(jnp.float32).astype(dtype)


def dot(left: Array, right: Array, contraction: Any) -> Array:
  """In float32; float32 factors keep their precision."""
  narrow = left.dtype == jnp.bfloat16
  return jax.lax.dot_general(
    left,
    right,
    contraction,
    precision=None if narrow else jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def lanes(width: int) -> int:
  """A width with what is filled up to whole lanes."""
  return -(-width // LANES) * LANES
