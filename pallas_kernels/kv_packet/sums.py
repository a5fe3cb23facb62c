"""What implementations of ``packet_attention`` share: queries by group, and sums of two tables.

R rows, J groups of them, T queries a row, C key heads, G queries a key head and token, V width of
values, Q = R / J G T queries of a group and key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Sums(NamedTuple):
  """A softmax over part of the keys, [J, C, Q, ...] in the dtype of the sums."""

  top: Array  # largest score
  total: Array  # sum of exp(score - top)
  out: Array  # sum of exp(score - top) * value


def over_tables(
  query: Array,
  kv_heads: int,
  tables: Sequence[Any],
  starts: Array,
  counts: Array,
  over: Callable[[Array, Array, Any], Sums],
) -> Array:
  """[R, T, H, V]: the softmax over all tables, in each of which a group of rows has one row.

  Args:
    query: [R, T, H, D].
    kv_heads: C.
    tables: with J rows each, a divisor of R.
    starts, counts: of the rows.
    over: the sums over one table, of queries [J, C, Q, D] at positions int32 [J, Q], which are
      negative where there is no query.
  """
  rows, time, heads, width = query.shape
  at = jnp.where(jnp.arange(time) < counts[:, None], starts[:, None] + jnp.arange(time), -1)
  # [R, C, G, T, ...], so that rows of a group can stand side by side.
  each = jnp.moveaxis(query.reshape(rows, time, kv_heads, -1, width), 1, 3)
  at = jnp.broadcast_to(at[:, None], (rows, heads // kv_heads, time))
  joined: Sums | None = None
  for table in tables:
    groups = len(table.pages)
    sums = over(_grouped(each, groups), at.reshape(groups, -1), table)
    sums = Sums(*(_by_row(v, rows) for v in sums))
    joined = sums if joined is None else _merged(joined, sums)
  assert joined is not None, "there is always a table"
  out = joined.out / jnp.where(joined.total > 0, joined.total, 1.0)
  return jnp.moveaxis(out.reshape(rows, heads, time, -1), 2, 1)


def seen_first(table: Any, at: Array, window: int | None) -> tuple[Any, Array]:
  """The table with the entries that a group sees first, in their order, and their number [J]."""
  used = (table.valid > 0) & (table.firsts <= jnp.max(at, axis=1, keepdims=True))
  if window is not None:
    first = jnp.min(jnp.where(at < 0, 2**30, at), axis=1, keepdims=True)
    used &= table.firsts + table.valid > first - window + 1
  order = jnp.argsort(~used, axis=1, stable=True)
  table = type(table)(*(jnp.take_along_axis(v, order, axis=1) for v in table))
  return table, jnp.sum(used, axis=1, dtype=jnp.int32)


def _merged(one: Sums, other: Sums) -> Sums:
  """A softmax over the keys of both."""
  top = jnp.maximum(one.top, other.top)
  left, right = jnp.exp(one.top - top), jnp.exp(other.top - top)
  return Sums(top, one.total * left + other.total * right, one.out * left + other.out * right)


def _grouped(x: Array, groups: int) -> Array:
  """[R, C, G, T, D] as [J, C, R / J G T, D]."""
  x = x.reshape(groups, -1, *x.shape[1:])
  return jnp.moveaxis(x, 1, 2).reshape(groups, x.shape[2], -1, x.shape[-1])


def _by_row(x: Array, rows: int) -> Array:
  """[J, C, R / J G T, ...] as [R, C, G T, ...]."""
  groups, kv_heads, _, width = x.shape
  x = x.reshape(groups, kv_heads, rows // groups, -1, width)
  return jnp.moveaxis(x, 2, 1).reshape(rows, kv_heads, -1, width)
