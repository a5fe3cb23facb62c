"""JAX's splash attention kernel for TPUs, where it can run."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from agentjax.sharding import LOGICAL_AXES, ways

Array = jax.Array

# Tokens a side of a tile, the largest that divides; ours.
_SIDES = (512, 256, 128)


def fits(query: Array, key: Array, value: Array) -> bool:
  """Whether the kernel supports these whole arrays [B, T, heads, width], sharded over the mesh.

  It multiplies in bfloat16, in tiles of at least 128 tokens; widths are multiples of 64.
  """
  widths = (query.shape[-1], value.shape[-1])
  return (
    all(v.dtype == jnp.bfloat16 for v in (query, key, value))
    and all(width % 64 == 0 for width in widths)
    and query.shape[1] % (ways("time") * _SIDES[-1]) == 0
  )


@functools.lru_cache(maxsize=16)
def kernel(time: int, heads: int, shards: int, window: int | None, interpret: bool = False) -> Any:
  """The kernel for one row: a tree of numpy tables of what tiles to visit.

  Args:
    time: tokens of a whole row.
    heads: query heads of a device.
    shards: cuts of the queries along time; keys are whole.
    window: see ``attend``.
    interpret: run on a CPU, slowly.
  """

  def make() -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention

    shape = (time, time)
    back = None if window is None else window - 1
    mask = splash_attention.LocalMask(shape, (back, 0), 0)
    side = next(side for side in _SIDES if time // shards % side == 0)
    made = splash_attention.make_splash_mha(
      splash_attention.MultiHeadMask([mask] * heads),
      block_sizes=splash_attention.BlockSizes(
        block_q=side,
        block_kv=side,
        block_q_dkv=side,
        block_kv_dkv=side,
        block_q_dq=side,
        block_kv_dq=side,
      ),
      head_shards=1,
      q_seq_shards=shards,
      interpret=interpret,
    )
    return jax.tree.map(np.asarray, made)

  # The tables are made of concrete arrays in another thread, which has neither the present trace
  # nor the mesh (its devices may exist only for compilation).
  with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
    return elsewhere.submit(make).result()


def kernel_spec(made: Any, mesh: AbstractMesh) -> Any:
  """Tree of ``PartitionSpec`` for ``kernel``: tables are cut as the queries are."""
  axes = tuple(m for m in LOGICAL_AXES["time"] if mesh.shape[m] > 1) or None
  return made.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, axes)))


def attend_splash(
  made: Any,
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch all_time kv_heads width"],
  value: Float[Array, "batch all_time kv_heads value_width"],
  query_segments: Int[Array, "batch time"],
  key_segments: Int[Array, "batch all_time"],
  *,
  scale: float,
) -> Float[Array, "batch time heads value_width"]:
  """As ``attend_tiles``, with the part of ``kernel`` that belongs to the queries."""
  from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

  scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
  heads_first = (jnp.swapaxes(v, 1, 2) for v in (scaled, key, value))
  out = jax.vmap(made)(*heads_first, SegmentIds(query_segments, key_segments))
  return jnp.swapaxes(out, 1, 2)
