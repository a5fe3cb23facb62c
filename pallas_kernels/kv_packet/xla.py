"""Attention over pieces in XLA: tiles of pages, gathered one after the other.

R rows, J groups of them, T queries a row, H heads, C key heads, G = H / C, S tokens a page, N pages
a tile, D and V widths of keys and values, Q = R / J G T queries of a group and key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kv_packet.rotary import Rotary, turn
from pallas_kernels.kv_packet.sums import Sums, over_tables
from pallas_kernels.paged_attention.xla import MASKED, TILE, gather, product

Array = jax.Array


class _Read(NamedTuple):
  """What is read, and by whom."""

  keys: Array
  values: Array | None
  key_scales: Array | None
  value_scales: Array | None
  query: Array  # [J, C, Q, D]
  at: Array  # int32 [J, Q], positions of the queries; before every token where there is none
  scale: float
  window: int | None
  value_dim: int
  rotary: Rotary | None


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
  """A running maximum and sum over each table's pages, then the sums of all tables joined.

  The queries of all rows of a group meet a page in one product.
  """

  def over(query: Array, at: Array, table: Any) -> Sums:
    read = _Read(
      keys, values, key_scales, value_scales, query, at, scale, window, value_dim, rotary
    )
    return _over(read, table)

  return over_tables(query, keys.shape[1], tables, starts, counts, over)


def compose_states(log_decays: Array, states: Array, initial_state: Array | None) -> Array:
  """Every state once, times the decay of the pieces behind it."""
  sums = jnp.cumsum(log_decays[:, ::-1], axis=1)[:, ::-1]  # of a piece and those behind it
  behind = jnp.pad(sums[:, 1:], ((0, 0), (0, 1), (0, 0)))
  state = jnp.einsum(
    "rkh,rkhpn->rhpn", jnp.exp(behind), states, precision=jax.lax.Precision.HIGHEST
  )
  if initial_state is None:
    return state
  return jnp.exp(sums[:, 0])[..., None, None] * initial_state + state


def _over(read: _Read, table: Any) -> Sums:
  """The softmax over one table's pages, of which those that nobody sees are skipped."""
  page, entries = read.keys.shape[2], table.pages.shape[1]
  pages = min(max(TILE // page, 1), entries)
  tiles = -(-entries // pages)
  spare = ((0, 0), (0, tiles * pages - entries))
  table = type(table)(*(jnp.pad(part, spare) for part in table))
  if tiles == 1:
    return _with_tile(read, table, 0, pages, None)
  dtype, lead = jnp.result_type(jnp.float32, read.query), read.query.shape[:3]
  none = Sums(
    jnp.full((*lead, 1), MASKED, dtype),
    jnp.zeros((*lead, 1), dtype),
    jnp.zeros((*lead, read.value_dim), dtype),
  )
  ends = jnp.max(read.at, axis=1, keepdims=True) + 1
  used = (table.valid > 0) & (table.firsts < ends)
  last = jnp.max(jnp.where(used, jnp.arange(tiles * pages), -1))

  def step(i: Array, sums: Sums) -> Sums:
    return _with_tile(read, table, i, pages, sums)

  return jax.lax.fori_loop(0, last // pages + 1, step, none)


def _with_tile(read: _Read, table: Any, tile: Array | int, pages: int, sums: Sums | None) -> Sums:
  """With the keys of tile ``tile``; alone it is one softmax."""
  table = type(table)(
    *(jax.lax.dynamic_slice_in_dim(part, tile * pages, pages, axis=1) for part in table)
  )
  groups, page = len(table.pages), read.keys.shape[2]
  slot = jnp.arange(page)
  position = (table.firsts[..., None] + slot).reshape(groups, -1)
  real = (slot < table.valid[..., None]).reshape(groups, -1)
  back = read.at[..., None] - position[:, None]
  seen = (back >= 0) & real[:, None]
  seen = seen if read.window is None else seen & (back < read.window)
  live = jnp.any(seen, axis=1)
  scores = jnp.where(seen[:, None], _scores(read, table) * read.scale, MASKED)
  top = jnp.max(scores, axis=-1, keepdims=True)
  top = top if sums is None else jnp.maximum(sums.top, top)
  # Where nothing is seen yet, top is MASKED and exp gives 1.
  weights = jnp.where(seen[:, None], jnp.exp(scores - top), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  pool = read.keys if read.values is None else read.values
  value = gather(pool, table.pages)[..., : read.value_dim]
  # Zeros for what no query sees: 0 * NaN would be NaN.
  value = jnp.where(live[:, None, :, None], value, jnp.zeros((), value.dtype))
  if read.value_scales is not None:
    scales = jnp.where(live[:, None], gather(read.value_scales, table.pages), 0.0)
    weights *= scales[:, :, None]
  out = product("jcqk,jckv->jcqv", weights.astype(read.query.dtype), value)
  if sums is None:
    return Sums(top, total, out)
  shrink = jnp.exp(sums.top - top)
  return Sums(top, sums.total * shrink + total, sums.out * shrink + out)


def _scores(read: _Read, table: Any) -> Array:
  """Products [J, C, Q, N S], without the scale. The smaller of queries and keys are turned."""
  key = gather(read.keys, table.pages)
  if read.rotary is None:
    scores = product("jcqd,jckd->jcqk", read.query, key)
  else:
    paged = key.reshape(*key.shape[:2], table.pages.shape[1], -1, key.shape[-1])
    queries = read.query.shape[2]
    if queries < paged.shape[3]:
      steps = -table.turns[:, None, :, None]
      turned = turn(read.query[:, :, None], steps, read.rotary)
      scores = product("jcnqd,jcnsd->jcqns", turned, paged)
      scores = scores.reshape(*scores.shape[:3], -1)
    else:
      paged = turn(paged.astype(read.query.dtype), table.turns[:, None, :, None], read.rotary)
      scores = product("jcqd,jckd->jcqk", read.query, paged.reshape(key.shape))
  if read.key_scales is None:
    return scores
  return scores * gather(read.key_scales, table.pages)[:, :, None]
