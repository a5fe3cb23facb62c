"""The kernels of attention over keys and values in pages, where they can run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.pages import Held, Paged
from agentjax.sharding import index, on_shards, ways
from pallas_kernels.implementations import NATIVE
from pallas_kernels.paged_attention import REFUSALS, paged_attention

Array = jax.Array

# XLA would lay out pools of other widths with pages on the lanes, and copy them for the kernel.
TPU_LANES = 128


def platforms(kernels: str) -> tuple[str, ...]:
  """Those that the kernel "pallas_tpu" or "pallas_gpu" is compiled for."""
  return NATIVE[kernels.removeprefix("pallas_")]


def fits(
  kernels: str,
  query: Array,
  keys: Held,
  values: Held | None,
  rows: Array | None,
  value_width: int | None,
) -> bool:
  """Whether a kernel takes these whole arrays (see ``attend_paged``), cut as the mesh says.

  Keys and values lie in pages, for TPUs with widths of a multiple of 128, and the kernel itself
  refuses nothing. On a mesh heads divide over "tensor", and key heads too unless there is only one,
  which every device has. Rows that name their slots must not be split, for the slot of a row may
  lie on other devices than the row.
  """
  if kernels not in REFUSALS or not isinstance(keys, Paged):
    return False
  if values is not None and not isinstance(values, Paged):
    return False
  pools = [keys.pool] if values is None else [keys.pool, values.pool]
  widths = [value_width or 0, *(pool.shape[-1] for pool in pools)]
  if kernels == "pallas_tpu" and any(width % TPU_LANES for width in widths):
    return False
  batch, tensor, kv_heads = ways("batch"), ways("heads"), keys.pool.shape[1]
  if query.shape[2] % tensor or (kv_heads % tensor and kv_heads > 1):
    return False
  if keys.ways != batch or (batch > 1 and rows is not None):
    return False

  def part(x: Array, cut: int, axis: int) -> jax.ShapeDtypeStruct:
    """Of one device."""
    shape = [x.shape[0] // batch, *x.shape[1:]]
    shape[axis] //= cut
    return jax.ShapeDtypeStruct(shape, x.dtype)

  own = [part(pool, tensor if kv_heads % tensor == 0 else 1, 1) for pool in pools]
  number = query.shape[0] // batch, keys.table.shape[1]
  refused = REFUSALS[kernels](
    part(query, tensor, 2),
    own[0],
    None if values is None else own[1],
    jax.ShapeDtypeStruct(number, keys.table.dtype),
    widths[-1] if value_width is None else value_width,
  )
  narrow = keys.scales is not None
  return refused is None and (narrow or all(pool.dtype == query.dtype for pool in pools))


def attend_paged(
  query: Float[Array, "rows time heads width"],
  keys: Held,
  values: Held | None,
  *,
  positions: Int[Array, "rows time"],
  scale: float,
  window: int | None = None,
  rows: Int[Array, " rows"] | None = None,
  counts: Int[Array, " rows"] | Bool[Array, " rows"] | None = None,
  value_width: int | None = None,
  implementation: str | None = None,
) -> Float[Array, "rows time heads value_width"]:
  """As ``attend_cache``, but 0 at padding and past the end of a slot.

  Args:
    implementation: of ``paged_attention``.
  """
  assert isinstance(keys, Paged) and (values is None or isinstance(values, Paged)), "see ``fits``"
  table = keys.table if rows is None else keys.table.at[rows].get(mode="clip")
  time = query.shape[1]
  # Tokens whose places lie past the end, instead of before 0, come first in their row.
  starts = jnp.min(positions - jnp.arange(time), axis=1)
  real = jnp.full_like(starts, time) if counts is None else counts.astype(starts.dtype)
  real = jnp.maximum(jnp.minimum(real, keys.length - starts), 0)

  heads = ("batch", None, "heads", None)
  split = keys.pool.shape[1] % ways("kv_heads") == 0
  pool = ("batch", "kv_heads" if split else None, None, None)
  given: dict[str, tuple[Any, tuple[str | None, ...]]] = {
    "query": (query, heads),
    "keys": (keys.pool, pool),
    "values": (None if values is None else values.pool, pool),
    "page_table": (table, ("batch", None)),
    "starts": (starts, ("batch",)),
    "counts": (real, ("batch",)),
    "key_scales": (keys.scales, pool[:3]),
    "value_scales": (None if values is None else values.scales, pool[:3]),
  }
  present = {name: pair for name, pair in given.items() if pair[0] is not None}

  def part(*arrays: Array) -> Array:
    own: dict[str, Any] = {"values": None, **dict(zip(present, arrays, strict=True))}
    # Pages are counted within the device's own.
    own["page_table"] -= index("batch") * own["keys"].shape[0]
    return paged_attention(
      **own,
      scale=scale,
      window=window,
      value_dim=value_width,
      implementation=implementation,
    )

  return on_shards(part, list(present.values()), heads, name="paged attention")
