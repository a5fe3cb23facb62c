"""Attention over gathered pieces with turned keys, states one after the other: slow, the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_packet.rotary import Rotary, turn

Array = jax.Array


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
  """All keys of every row at once, [R, T, H, V] in the dtype of the sums.

  Of each of ``tables`` [J, M] a row reads that of its group of R / J rows.
  """
  dtype = jnp.result_type(jnp.float32, query)
  rows, time, heads, _ = query.shape
  page = keys.shape[2]

  def every(name: str) -> Array:
    parts = (getattr(table, name) for table in tables)
    return jnp.concatenate([jnp.repeat(p, rows // len(p), axis=0) for p in parts], axis=1)

  slot = jnp.arange(page)
  position = (every("firsts")[..., None] + slot).reshape(rows, -1)
  real = (slot < every("valid")[..., None]).reshape(rows, -1)
  back = (starts[:, None] + jnp.arange(time))[..., None] - position[:, None]
  seen = (back >= 0) & real[:, None] & (jnp.arange(time) < counts[:, None])[..., None]
  seen = seen if window is None else seen & (back < window)

  def dense(pool: Array, scales: Array | None) -> Array:
    """[R, K, C, width], zeros where no query of the row sees them."""
    pool = pool.astype(dtype) if scales is None else pool.astype(dtype) * scales[..., None]
    held = jnp.swapaxes(pool[every("pages")], 2, 3).reshape(rows, -1, *pool.shape[1::2])
    return jnp.where(jnp.any(seen, axis=1)[..., None, None], held, 0)

  def by_head(held: Array) -> Array:
    return jnp.repeat(held, heads // keys.shape[1], axis=2)

  key = dense(keys, key_scales)
  value = key[..., :value_dim] if values is None else dense(values, value_scales)
  if rotary is not None:
    turns = jnp.repeat(every("turns"), page, axis=1)
    key = turn(key, turns[..., None], rotary)
  exact = jax.lax.Precision.HIGHEST
  scores = jnp.einsum("rthd,rkhd->rhtk", query.astype(dtype), by_head(key), precision=exact)
  weights = jax.nn.softmax(scores * scale, where=seen[:, None], axis=-1)
  weights = jnp.where(jnp.any(seen, axis=-1)[:, None, :, None], weights, 0.0)
  return jnp.einsum("rhtk,rkhv->rthv", weights, by_head(value), precision=exact)


def compose_states(log_decays: Array, states: Array, initial_state: Array | None) -> Array:
  """``S <- exp(l_k) S + S_k``, piece by piece."""
  state = jnp.zeros_like(states[:, 0]) if initial_state is None else initial_state
  for k in range(states.shape[1]):
    state = jnp.exp(log_decays[:, k])[..., None, None] * state + states[:, k]
  return state
