"""Paged attention over gathered keys and values: slow, what the others are compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


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
  """All keys of every row at once, [R, T, H, V] in the dtype of the sums."""
  dtype = jnp.result_type(jnp.float32, query)
  time, places = query.shape[1], page_table.shape[1] * keys.shape[2]
  back = starts[:, None, None] + jnp.arange(time)[:, None] - jnp.arange(places)
  seen = (back >= 0) & (jnp.arange(time) < counts[:, None])[..., None]
  seen = seen if window is None else seen & (back < window)

  def dense(pool: Array, scales: Array | None) -> Array:
    """[R, K, H, width] of pages [P, C, S, width], zeros where no query of the row sees them."""
    pool = pool.astype(dtype) if scales is None else pool.astype(dtype) * scales[..., None]
    held = jnp.swapaxes(pool[page_table], 2, 3).reshape(len(starts), places, *pool.shape[1::2])
    held = jnp.where(jnp.any(seen, axis=1)[..., None, None], held, 0)
    return jnp.repeat(held, query.shape[2] // pool.shape[1], axis=2)

  key = dense(keys, key_scales)
  value = key[..., :value_dim] if values is None else dense(values, value_scales)
  exact = jax.lax.Precision.HIGHEST
  scores = jnp.einsum("rthd,rkhd->rhtk", query.astype(dtype), key, precision=exact) * scale
  weights = jax.nn.softmax(scores, where=seen[:, None], axis=-1)
  return jnp.einsum("rhtk,rkhv->rthv", weights, value, precision=exact)
