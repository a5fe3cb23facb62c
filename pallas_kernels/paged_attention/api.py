"""Paged attention: signature, mathematics, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.implementations import check_shape, choose
from pallas_kernels.paged_attention import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.paged_attention.quantised import QUANTISED

Array = jax.Array

IMPLEMENTATIONS: Mapping[str, Callable[..., Array]] = {
  "reference": reference.paged_attention,
  "xla": xla.paged_attention,
  "pallas_tpu": pallas_tpu.paged_attention,
  "pallas_gpu": pallas_gpu.paged_attention,
}
# Why a kernel does not take some query, keys, values, page table and V; None where it does.
REFUSALS: Mapping[str, Callable[..., str | None]] = {
  "pallas_tpu": pallas_tpu.refusal,
  "pallas_gpu": pallas_gpu.refusal,
}


def paged_attention(
  query: Array,
  keys: Array,
  values: Array | None,
  page_table: Array,
  starts: Array,
  counts: Array,
  *,
  scale: float,
  window: int | None = None,
  value_dim: int | None = None,
  key_scales: Array | None = None,
  value_scales: Array | None = None,
  implementation: str | None = None,
) -> Array:
  r"""``softmax(scale q kᵀ) v`` of new tokens over what their rows hold in pages.

  Query t of row r stands at place ``starts[r] + t`` and sees the keys at places up to its own, with
  a ``window`` only the last ``window`` of them, itself included. Place p of row r is token
  ``p % S`` of page ``page_table[r, p // S]``. The keys and values of the new tokens are in the
  pages already. A decoding step is T = 1, a prefill or a longer turn T > 1 with a count a row.
  Softmax and sums are float32 (float64 if the query is); there is no gradient.

  What a row does not see changes none of its bits, NaN included: other rows, the physical place of
  its pages, pages it does not use or that lie before its window, tokens past its end. Rows may
  share pages.

  Args:
    query: [R, T, H, D]; head h reads key head ``h // (H / C)``.
    keys: pool [P, C, S, D] of P pages of S tokens, in the dtype of the query or a quantised one.
    values: pool [P, C, S, V]; None where the values are the first ``value_dim`` channels of the
      keys, as in latent attention.
    page_table: int32 [R, M]. An entry that no visible place needs may be any number.
    starts: int32 [R], tokens the row held before these. Below 0 the first ``-starts`` tokens have
      no place: like padding they see nothing.
    counts: int32 [R], tokens of the row that are not right padding, 0..T;
      ``starts + counts <= M S``.
    scale: on the products.
    window: at least 1, or None for all places.
    value_dim: V, only where ``values`` is None.
    key_scales, value_scales: float32 [P, C, S] of quantised pools (``quantize_tokens``); without
      ``values``, ``key_scales`` are the scales of both.
    implementation: None (the fastest measured for this backend) or a key of ``IMPLEMENTATIONS``.

  Returns:
    [R, T, H, V] in the dtype of the query; 0 at padding and where a token has no place.

  Raises:
    ValueError: shapes, dtypes or options that do not fit, or an implementation that is not
      available or cannot do the shape.

  References: Kwon et al., 2309.06180 (pages); Dao, 2307.08691 (running maximum and sum).
  """
  run = choose("paged_attention", implementation, IMPLEMENTATIONS, default="xla")
  value_dim = _check_pools(query, keys, values, value_dim, key_scales, value_scales)
  rows, time = query.shape[:2]
  if page_table.ndim != 2 or page_table.shape[0] != rows or not page_table.shape[1]:
    raise ValueError(
      f"paged_attention: page_table must be int32 [R={rows}, M >= 1], got {page_table.shape}."
    )
  check_shape("paged_attention", "starts", starts, (rows,))
  check_shape("paged_attention", "counts", counts, (rows,))
  if window is not None and window < 1:
    raise ValueError(f"paged_attention: window={window}; allowed: at least 1, or None.")
  out = run(
    query,
    keys,
    values,
    key_scales,
    key_scales if values is None else value_scales,
    jnp.clip(page_table, 0, keys.shape[0] - 1),
    starts,
    counts,
    scale,
    window,
    value_dim,
  )
  token = jnp.arange(time)
  real = (token < counts[:, None]) & (token >= -starts[:, None])
  return jnp.where(real[..., None, None], out, 0.0).astype(query.dtype)


def _check_pools(
  query: Array,
  keys: Array,
  values: Array | None,
  value_dim: int | None,
  key_scales: Array | None,
  value_scales: Array | None,
) -> int:
  """The width of values; raises ValueError for what does not fit."""
  if query.ndim != 4 or 0 in query.shape:
    raise ValueError(
      f"paged_attention: query must be [R, T, H, D] without an empty axis, got {query.shape}."
    )
  heads, width = query.shape[2:]
  if keys.ndim != 4 or 0 in keys.shape or keys.shape[3] != width or heads % keys.shape[1]:
    raise ValueError(
      f"paged_attention: keys must be [P, C, S, D={width}] with C dividing H={heads}, got "
      f"{keys.shape}."
    )
  if (values is None) == (value_dim is None):
    raise ValueError(
      "paged_attention: either values, or value_dim where values are the first channels of keys; "
      f"got {'neither' if values is None else f'both, value_dim={value_dim}'}."
    )
  if value_dim is not None and not 1 <= value_dim <= width:
    raise ValueError(f"paged_attention: value_dim={value_dim}; allowed: 1..D={width}.")
  if values is not None and (values.ndim != 4 or values.shape[:3] != keys.shape[:3]):
    raise ValueError(
      f"paged_attention: values must be [P, C, S, V] with {keys.shape[:3]}, got {values.shape}."
    )
  pools = {"key": (keys, key_scales), "value": (values, value_scales)}
  for name, (pool, scales) in pools.items():
    check_shape("paged_attention", f"{name}_scales", scales, keys.shape[:3])
    narrow = pool is not None and pool.dtype.name in QUANTISED
    if narrow != (scales is not None):
      raise ValueError(
        f"paged_attention: {name}_scales go with {name}s of dtype {' or '.join(QUANTISED)}, got "
        f"{None if pool is None else pool.dtype.name} with{'out' if scales is None else ''} scales."
      )
    if pool is not None and not narrow and pool.dtype != query.dtype:
      raise ValueError(
        f"paged_attention: {name}s must be {query.dtype}, as the query, or quantised, got "
        f"{pool.dtype}."
      )
  if value_dim is not None:
    return value_dim
  assert values is not None, "one of the two, as checked above"
  return values.shape[3]
