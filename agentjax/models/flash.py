"""JAX's flash attention kernel for NVIDIA GPUs, where it can run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.sharding import ways

Array = jax.Array

# Tokens a side of a tile, forward and backward: two stages of it fit in the shared memory of every
# GPU since Ampere with the widest head; ours.
_SIDE, _BACKWARD_SIDE = 64, 32
_WIDEST = 128


def fits(query: Array, key: Array, value: Array, window: int | None) -> bool:
  """Whether the kernel takes these whole arrays [B, T, heads, width], cut as the mesh says.

  It multiplies in bfloat16, in tiles of 64 tokens; keys and values have one width, up to 128. It
  has neither a window nor a place of the first query, so that time must not be split.
  """
  return (
    window is None
    and ways("time") == 1
    and all(v.dtype == jnp.bfloat16 for v in (query, key, value))
    and query.shape[-1] == value.shape[-1] <= _WIDEST
    and query.shape[1] % _SIDE == 0
  )


def attend_flash(
  query: Float[Array, "batch time heads width"],
  key: Float[Array, "batch time kv_heads width"],
  value: Float[Array, "batch time kv_heads width"],
  query_segments: Int[Array, "batch time"],
  key_segments: Int[Array, "batch time"],
  *,
  scale: float,
  interpret: bool = False,
) -> Float[Array, "batch time heads width"]:
  """As ``attend_tiles`` of all queries, with a key head of its own for every head.

  Args:
    interpret: run on a CPU, slowly.
  """
  from jax.experimental.pallas.ops.gpu import attention

  del key_segments  # the same, where time is whole
  shared = query.shape[2] // key.shape[2]
  key, value = (jnp.repeat(v, shared, axis=2) for v in (key, value))
  sizes = attention.BlockSizes(
    block_q=_SIDE,
    block_k=_SIDE,
    block_q_dkv=_BACKWARD_SIDE,
    block_kv_dkv=_BACKWARD_SIDE,
    block_q_dq=_BACKWARD_SIDE,
    block_kv_dq=_BACKWARD_SIDE,
  )
  return attention.mha(
    query,
    key,
    value,
    query_segments,
    sm_scale=scale,
    causal=True,
    block_sizes=sizes,
    interpret=interpret,
  )
