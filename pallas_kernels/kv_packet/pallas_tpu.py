"""Attention over pieces for TPUs: a Mosaic kernel that copies page after page into VMEM.

J groups of rows, M entries of their tables, C key heads, S tokens a page, Q queries a block and key
head, D and V widths of keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementations import on_platform
from pallas_kernels.kv_packet.rotary import Rotary, factors, partner
from pallas_kernels.kv_packet.sums import Sums, over_tables, seen_first
from pallas_kernels.paged_attention.pallas_tpu import (
  LANES,
  MASKED,
  NN,
  NT,
  SUBLANES,
  VMEM_BYTES,
  dot,
  lanes,
)

Array = jax.Array
Ref = Any

# Most queries a block and key head.
_QUERIES = 256
# Bytes of the queries, turned queries and sums of a block.
_BLOCK_BYTES = 4 * 2**20
# Entries of a table: four numbers of each fit in the 1 MiB of scalar memory with all else.
_ENTRIES = 56 * 1024


class _Sizes(NamedTuple):
  """Static sizes of a call. A grid step is a group and a block of queries of every key head."""

  groups: int  # J
  entries: int  # M
  blocks: int  # of the queries of a group and key head
  queries: int  # Q of a block
  kv_heads: int
  page: int  # S
  width: int  # D
  value_dim: int  # V
  apart: bool  # values have a pool of their own
  turned: bool  # keys have positions
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
  """One grid step a group and block of queries, which walks over the pages that it sees.

  A page, with all its key heads, is one copy; the next one is copied while it is worked on. Queries
  are turned back once a packet, from themselves and their partners, which XLA makes. Entries whose
  pages a group does not see are sorted away before.

  Raises:
    ValueError: what ``refusal`` says.
  """
  del key_scales, value_scales
  refused = refusal(query, keys, tables)
  if refused is not None:
    raise ValueError(refused)

  def over(query: Array, at: Array, table: Any) -> Sums:
    sizes = _sizes(query, keys, values, table, scale, window, value_dim, rotary is not None)
    pages, number = seen_first(table, at, window)
    length = sizes.blocks * sizes.queries
    spare = length - query.shape[2]
    query = jnp.pad(query, ((0, 0), (0, 0), (0, spare), (0, 0)))
    at = jnp.pad(at, ((0, 0), (0, spare)), constant_values=-1)
    arrays = [*(v.reshape(-1) for v in pages), number, at[..., None], query]
    if rotary is not None:
      both = jnp.stack(factors(-pages.turns, rotary, sizes.width), axis=2)  # [J, M, 2, D]
      arrays += [partner(query, rotary), both.reshape(-1, 2, sizes.width)]
    arrays.append(keys)
    if values is not None:
      arrays.append(values)
    found = on_platform("tpu", functools.partial(_call, sizes, query.dtype), *arrays)
    return Sums(*(v[:, :, : length - spare] for v in found))

  return over_tables(query, keys.shape[1], tables, starts, counts, over)


def refusal(query: Any, keys: Any, tables: Sequence[Any]) -> str | None:
  """Why the kernel does not take arrays of these shapes and dtypes; None where it does.

  It takes queries and pools in float32 or bfloat16, tables of up to 57,344 entries, and pages whose
  tokens fill the sublanes: S is a multiple of 8 in float32, 16 in bfloat16.
  """
  page, item = keys.shape[2], keys.dtype.itemsize
  if query.dtype not in (jnp.float32, jnp.bfloat16) or item == 1 or page % (8 * 4 // item):
    return (
      "packet_attention: implementation='pallas_tpu' takes queries and pools in float32, with "
      f"pages of a multiple of 8 tokens, or in bfloat16, of 16; got {query.dtype}, {keys.dtype} "
      f"and {page} tokens; use implementation='xla'."
    )
  most = max(table.pages.size for table in tables)
  if most > _ENTRIES:
    return (
      "packet_attention: implementation='pallas_tpu' holds a table in scalar memory, up to "
      f"{_ENTRIES} entries; got {most}; take larger pages, fewer rows a call, or "
      "implementation='xla'."
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
  turned: bool,
) -> _Sizes:
  groups, kv_heads, number, width = query.shape
  numbers = 3 * lanes(width) + lanes(value_dim) + 3 * LANES  # of a query
  most = max(_BLOCK_BYTES // (4 * kv_heads * numbers) // SUBLANES, 1) * SUBLANES
  queries = min(-(-number // SUBLANES) * SUBLANES, most, _QUERIES)
  return _Sizes(
    groups=groups,
    entries=table.pages.shape[1],
    blocks=-(-number // queries),
    queries=queries,
    kv_heads=kv_heads,
    page=keys.shape[2],
    width=width,
    value_dim=value_dim,
    apart=values is not None,
    turned=turned,
    scale=scale,
    window=window,
  )


def _call(sizes: _Sizes, dtype: jnp.dtype, interpret: bool) -> Callable[..., list[Array]]:
  """The kernel over a table's four columns [J M], numbers, positions, queries and pools."""

  def at(group: Array, block: Array, *_: Ref) -> tuple[Array | int, ...]:
    return (group, 0, block, 0)

  def rows(*tail: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, sizes.kv_heads, sizes.queries, *tail), at)

  pools = 1 + sizes.apart
  buffers = [pltpu.VMEM((2, sizes.kv_heads, sizes.page, sizes.width), dtype)]
  if sizes.apart:
    buffers.append(pltpu.VMEM((2, sizes.kv_heads, sizes.page, sizes.value_dim), dtype))
  if sizes.turned:
    buffers.append(pltpu.VMEM((2, 2, sizes.width), jnp.float32))
  block = (sizes.kv_heads, sizes.queries)
  length = sizes.blocks * sizes.queries
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  positions = pl.BlockSpec((None, sizes.queries, 1), lambda group, block, *_: (group, block, 0))
  queries = [rows(sizes.width)] * (1 + sizes.turned)
  return pl.pallas_call(
    functools.partial(_kernel, sizes, pools),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(sizes.groups, sizes.blocks),
      in_specs=[positions, *queries, *[anywhere] * len(buffers)],
      out_specs=[rows(1), rows(1), rows(sizes.value_dim)],
      scratch_shapes=[
        *buffers,
        pltpu.SemaphoreType.DMA((2, len(buffers))),
        pltpu.VMEM((*block, sizes.width), dtype),
        pltpu.VMEM((*block, LANES), jnp.float32),
        pltpu.VMEM((*block, LANES), jnp.float32),
        pltpu.VMEM((*block, sizes.value_dim), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((sizes.groups, sizes.kv_heads, length, last), jnp.float32)
      for last in (1, 1, sizes.value_dim)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=_vmem_bytes(sizes, dtype.itemsize),
    ),
    name="packet_attention",
    interpret=interpret,
  )


def _vmem_bytes(sizes: _Sizes, item: int) -> int:
  """Twice what pages, blocks, sums and the scores of a head take, if the default is less."""
  widths = lanes(sizes.width) + lanes(sizes.value_dim) * sizes.apart
  pages = 2 * sizes.kv_heads * sizes.page * widths * item
  blocks = sizes.kv_heads * sizes.queries * 4 * (5 * lanes(sizes.width) + 3 * lanes(1) * 2)
  sums = sizes.kv_heads * sizes.queries * 4 * (3 * lanes(sizes.value_dim) + 2 * LANES)
  work = 4 * (3 * sizes.queries * lanes(sizes.page) + sizes.page * widths)
  return max(VMEM_BYTES, 2 * (pages + blocks + sums + work))


def _kernel(
  sizes: _Sizes,
  pools: int,
  pages: Ref,
  firsts: Ref,
  valid: Ref,
  turns: Ref,
  number: Ref,
  at_ref: Ref,
  query_ref: Ref,
  *refs: Ref,
) -> None:
  """refs: partners and factors of turned keys, pools, outputs, and the scratch of ``_call``."""
  partner_ref, refs = (refs[0], refs[1:]) if sizes.turned else (None, refs)
  factors_ref, refs = (refs[0], refs[1:]) if sizes.turned else (None, refs)
  held, outputs = refs[:pools], refs[pools : pools + 3]
  rest = refs[pools + 3 :]
  buffers, semaphores, turned_ref, sums = rest[: pools + sizes.turned], *rest[-5:-3], rest[-3:]
  top_ref, total_ref, sum_ref = sums
  base = pl.program_id(0) * sizes.entries
  count = number[pl.program_id(0)]

  def copies(e: Array, buffer: Array, act: Callable[[Any], None]) -> None:
    sources = [pool.at[pages[base + e]] for pool in held]
    if factors_ref is not None:
      sources.append(factors_ref.at[base + e])
    for j, source in enumerate(sources):
      act(pltpu.make_async_copy(source, buffers[j].at[buffer], semaphores.at[buffer, j]))

  @pl.when(count > 0)
  def first() -> None:
    copies(jnp.int32(0), jnp.int32(0), lambda copy: copy.start())

  top_ref[...] = jnp.full_like(top_ref, MASKED)
  total_ref[...] = jnp.zeros_like(total_ref)
  sum_ref[...] = jnp.zeros_like(sum_ref)

  def page(e: Array, _: None) -> None:
    buffer = jax.lax.rem(e, 2)

    @pl.when(e + 1 < count)
    def ahead() -> None:
      copies(e + 1, 1 - buffer, lambda copy: copy.start())

    copies(e, buffer, lambda copy: copy.wait())
    own = query_ref
    if partner_ref is not None:
      own, last = turned_ref, jnp.maximum(e - 1, 0)

      @pl.when((e == 0) | (turns[base + e] != turns[base + last]))
      def turned() -> None:
        cos, sin = (buffers[pools][buffer, pl.ds(i, 1), :] for i in range(2))

        def head(c: Array, _: None) -> None:
          straight, other = (ref[c].astype(jnp.float32) for ref in (query_ref, partner_ref))
          turned_ref[c] = (straight * cos + other * sin).astype(turned_ref.dtype)

        jax.lax.fori_loop(0, sizes.kv_heads, head, None)

    tokens = [ref.at[buffer] for ref in buffers[:pools]]
    _join(sizes, firsts[base + e], valid[base + e], at_ref, own, tokens, sums)

  jax.lax.fori_loop(0, count, page, None)

  def write(c: Array, _: None) -> None:
    outputs[0][c] = top_ref[c][:, :1]
    outputs[1][c] = total_ref[c][:, :1]
    outputs[2][c] = sum_ref[c]

  jax.lax.fori_loop(0, sizes.kv_heads, write, None)


def _join(
  sizes: _Sizes,
  first: Array,
  valid: Array,
  at_ref: Ref,
  query_ref: Ref,
  tokens: Sequence[Ref],
  sums: Sequence[Ref],
) -> None:
  """Adds a page to the sums of all key heads."""
  top_ref, total_ref, sum_ref = sums
  at = at_ref[...]  # [Q, 1]
  slot = jax.lax.broadcasted_iota(jnp.int32, (sizes.queries, sizes.page), 1)
  back = at - first - slot
  seen = (back >= 0) & (slot < valid)
  if sizes.window is not None:
    seen &= back < sizes.window
  # 0 * NaN would be NaN: what no query of the block sees is cleared.
  place = jax.lax.broadcasted_iota(jnp.int32, (sizes.page, 1), 0)
  live = (place < valid) & (first + place <= jnp.max(at))
  if sizes.window is not None:
    live &= first + place > jnp.min(jnp.where(at < 0, 2**30, at)) - sizes.window

  def head(c: Array, _: None) -> None:
    query = query_ref[c]
    scores = jnp.where(seen, dot(query, tokens[0][c], NT) * sizes.scale, MASKED)
    last = top_ref[c][:, :1]
    top = jnp.maximum(last, jnp.max(scores, axis=1, keepdims=True))
    weights, shrink = jnp.where(seen, jnp.exp(scores - top), 0.0), jnp.exp(last - top)
    total = total_ref[c][:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    top_ref[c] = jnp.broadcast_to(top, top_ref.shape[1:])
    total_ref[c] = jnp.broadcast_to(total, total_ref.shape[1:])
    value = tokens[-1][c] if sizes.apart else tokens[0][c][:, : sizes.value_dim]
    value = jnp.where(live, value.astype(jnp.float32), 0.0).astype(query.dtype)
    sum_ref[c] = sum_ref[c] * shrink + dot(weights.astype(query.dtype), value, NN)

  jax.lax.fori_loop(0, sizes.kv_heads, head, None)
