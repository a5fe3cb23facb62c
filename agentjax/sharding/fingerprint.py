"""A hash of parameters that does not depend on how they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.sharding.order import dispatching, in_order

_WORDS = 4
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


def fingerprint(tree: Any) -> str:
  """128-bit hash of a pytree's array bits, as 32 hex digits.

  Each 32-bit pattern is mixed with its position and summed modulo 2**32, so the result is exact and
  the same for every sharding and summation order; one changed bit changes it. Not cryptographic.
  Sharded arrays are hashed on their devices; only sums are exchanged.
  """
  with dispatching():
    every = [in_order(_leaf_sums(leaf)) for leaf in jax.tree.leaves(tree)]
  total = np.zeros(_WORDS, np.uint32)
  for i, sums in enumerate(jax.device_get(every)):
    total += np.asarray(_mix(np.asarray(sums) + np.uint32((i * 2 + 1) & 0xFFFFFFFF)))
  return "".join(f"{int(word):08x}" for word in total)


@jax.jit
def _leaf_sums(leaf: jax.Array) -> jax.Array:
  """uint32 [4] of one array: compiled once for all arrays of its shape and sharding."""
  bits = _bits(leaf)
  position = jnp.zeros(bits.shape, jnp.uint32)  # in row-major order; no reshape, which would gather
  stride = 1
  for axis in reversed(range(bits.ndim)):
    index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    position += index * jnp.uint32(stride & 0xFFFFFFFF)
    stride *= bits.shape[axis]
  position *= jnp.uint32(0x01000193)
  odd = jnp.asarray(_ODD).reshape(_WORDS, *(1 for _ in bits.shape))
  mixed = _mix(bits ^ _mix(position + odd) ^ odd)
  # One sum for all words, so that the devices exchange only one reduction.
  return jnp.sum(mixed, axis=tuple(range(1, mixed.ndim)), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  if x.dtype.itemsize == 8:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: Any) -> Any:
  """Murmur3's finaliser: every input bit reaches every output bit."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
