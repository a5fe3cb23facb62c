"""Rows with places in pages of a common pool: they may share pages, and take what they fill.

Attention keeps its tokens in ``Held``: an array [rows, ..., length, width], or ``Paged``. Every
function here takes both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.sharding import on_shards, ways
from pallas_kernels.paged_attention import quantize_tokens

Array = jax.Array


@flax.struct.dataclass
class Quantised:
  """A pool of narrow numbers, as it is kept between calls: ``numbers * scales[..., None]``.

  Attributes:
    numbers: [pages, ..., tokens, width], of a dtype that ``quantize_tokens`` makes.
    scales: float32 [pages, ..., tokens].
  """

  numbers: Array
  scales: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the pool that this stands for."""
    return self.numbers.shape


@flax.struct.dataclass
class Paged:
  """Place p of row r is place ``p % tokens`` of page ``table[r, p // tokens]``.

  On a mesh rows and pages are split in ``ways`` parts of equal size, and rows have pages of their
  own part only. The first page of each part belongs to no row. It holds zeros, a table names it
  where a row has no page, and writes to it are dropped.

  Attributes:
    pool: [pages, ..., tokens, width].
    table: int32 [rows, entries].
    length: places of a row.
    ways: parts.
    empty: pages at the start of each part that belong to no row.
    scales: float32 [pages, ..., tokens], where ``pool`` holds narrow numbers (``Quantised``).
    dtype: of what is read of narrow numbers.
  """

  pool: Array
  table: Array
  length: int = flax.struct.field(pytree_node=False)
  ways: int = flax.struct.field(pytree_node=False, default=1)
  empty: int = flax.struct.field(pytree_node=False, default=1)
  scales: Array | None = None
  dtype: Any = flax.struct.field(pytree_node=False, default=None)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array that this stands for."""
    return (self.table.shape[0], *self.pool.shape[1:-2], self.length, self.pool.shape[-1])


Held = Array | Paged


def is_paged(value: Any) -> bool:
  """Whether it is ``Paged``; for ``is_leaf``."""
  return isinstance(value, Paged)


def reshaped(held: Held, change: Callable[[Array], Array]) -> Held:
  """``change`` of the array or pool, whose last two axes must stay; its rows or pages may change.

  Where the pool holds narrow numbers, ``change`` also gets their scales, as a pool of width 1.
  """
  if not isinstance(held, Paged):
    return change(held)
  scales = held.scales if held.scales is None else change(held.scales[..., None])[..., 0]
  return dataclasses.replace(held, pool=change(held.pool), scales=scales)


def read_places(
  held: Held, rows: Int[Array, " rows"] | None, start: Array | int, size: int
) -> Float[Array, "rows ... size width"]:
  """``size`` places of some rows (None: all). Results for a row out of range mean nothing.

  Args:
    held: of all rows.
    rows: which.
    start: first place. A traced one must be a multiple of a page's tokens if ``size`` and the
      length are.
    size: places.
  """
  if not isinstance(held, Paged):
    if rows is not None and rows.shape == (1,):
      first = (rows[0], *(0,) * (held.ndim - 3), start, 0)
      return jax.lax.dynamic_slice(held, first, (1, *held.shape[1:-2], size, held.shape[-1]))
    part = held
    if size < held.shape[-2]:
      part = jax.lax.dynamic_slice_in_dim(held, start, size, axis=held.ndim - 2)
    return part if rows is None else part.at[rows].get(mode="clip")
  if held.scales is not None:
    numbers, scales = (read_places(part, rows, start, size) for part in _parts(held))
    return (numbers.astype(jnp.float32) * scales).astype(held.dtype)
  table = held.table if rows is None else held.table.at[rows].get(mode="clip")
  tokens = held.pool.shape[-2]
  if isinstance(start, int):
    whole = start % tokens == 0
  else:
    whole = size % tokens == 0 and held.length % tokens == 0
  taken: Callable[[Array, Array], Array]
  if whole:
    pages = jax.lax.dynamic_slice_in_dim(table, start // tokens, -(-size // tokens), axis=1)
    taken = functools.partial(_whole_pages, size=size)
  else:
    place = start + jnp.arange(size)
    pages = table[:, place // tokens]

    def by_place(pool: Array, pages: Array) -> Array:
      found = pool.at[place_index(pool, pages, place % tokens)].get(mode="promise_in_bounds")
      return jnp.moveaxis(found, 1, -2)

    taken = by_place
  if held.ways > 1 and rows is None:
    found = jax.vmap(taken)(*_by_way(held, pages))
    return found.reshape(-1, *found.shape[2:])
  if held.ways > 1 or held.pool.ndim != 4:
    return taken(held.pool, pages)
  # By itself the partitioner gives every device all heads.
  heads = None if held.pool.shape[1] % ways("kv_heads") else "kv_heads"
  axes = (None, heads, None, None)
  arguments = ((held.pool, axes), (pages, (None, None)))
  return on_shards(taken, arguments, axes, name="pages")


def write_places(
  held: Held,
  rows: Int[Array, " rows"] | None,
  places: Int[Array, "rows time"],
  values: Float[Array, "rows time ... width"],
) -> Held:
  """Writes ``values`` at places of some rows; None is all of them.

  A write past the end, to no row or to no page is dropped.
  """
  every = jnp.arange(held.shape[0]) if rows is None else rows
  if not isinstance(held, Paged):
    return _put(held, every[:, None], places, values)
  if held.scales is not None:
    both = zip(_parts(held), quantize_tokens(values, held.pool.dtype), strict=True)
    numbers, scales = (
      write_places(part, rows, places, v.reshape(*values.shape[:-1], -1)) for part, v in both
    )
    assert isinstance(numbers, Paged) and isinstance(scales, Paged)
    return dataclasses.replace(held, pool=numbers.pool, scales=scales.pool[..., 0])
  tokens, part = held.pool.shape[-2], held.pool.shape[0] // held.ways
  found = held.table.at[every[:, None], places // tokens].get(mode="fill", fill_value=0)
  lost = (found % part < held.empty) | (places >= held.length)
  pages = jnp.where(lost, held.pool.shape[0], found)

  if rows is not None or held.ways == 1:
    return dataclasses.replace(held, pool=_put(held.pool, pages, places % tokens, values))
  pool, own = _by_way(held, pages)
  split = (v.reshape(held.ways, -1, *v.shape[1:]) for v in (places % tokens, values))
  pool = jax.vmap(_put)(pool, jnp.where(own < part, own, part), *split)
  return dataclasses.replace(held, pool=pool.reshape(held.pool.shape))


def place_index(array: Array, first: Array, place: Array) -> tuple[Any, ...]:
  """Index of ``array`` [first, ..., place, width]; the axes of the result follow theirs."""
  return (first, *(slice(None),) * (array.ndim - 3), place)


def _parts(held: Paged) -> tuple[Paged, Paged]:
  """Narrow numbers, and their scales as a pool of width 1."""
  assert held.scales is not None
  numbers = dataclasses.replace(held, scales=None)
  return numbers, dataclasses.replace(numbers, pool=held.scales[..., None])


def _whole_pages(pool: Array, pages: Array, *, size: int) -> Array:
  """The pages [rows, n] of each row, joined to [rows, ..., size, width]."""
  between = pool.shape[1:-2]
  first = pages.reshape(len(pages), *(1,) * len(between), -1)
  index = (first, *(i[..., None] for i in jnp.ix_(*map(jnp.arange, between))))
  found = pool.at[index].get(mode="promise_in_bounds")
  return found.reshape(len(pages), *between, -1, pool.shape[-1])[..., :size, :]


def _put(array: Array, first: Array, place: Array, values: Array) -> Array:
  """Sets ``array[first, ..., place]``; what is out of range is dropped.

  Except on CPUs the axes between are indexed too: a window over them makes a TPU copy the array to
    another layout. On CPUs a window is faster.
  """
  between = array.shape[1:-2]
  lead = (..., *(None,) * len(between))

  def by_number() -> Array:
    index = (first[lead], *jnp.ix_(*map(jnp.arange, between)), place[lead])
    return array.at[index].set(values, mode="drop")

  def by_window() -> Array:
    return array.at[place_index(array, first, place)].set(values, mode="drop")

  return jax.lax.platform_dependent(cpu=by_window, default=by_number)


def _by_way(held: Paged, pages: Array) -> tuple[Array, Array]:
  """The pool [ways, pages, ...], and pages [ways, rows, ...] counted within each part."""
  pool = held.pool.reshape(held.ways, -1, *held.pool.shape[1:])
  split = pages.reshape(held.ways, -1, *pages.shape[1:])
  first = jnp.arange(held.ways) * pool.shape[1]
  return pool, split - first.reshape(-1, *(1,) * (split.ndim - 1))
