"""A hash of parameters that does not depend on how they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = 4
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


def fingerprint(tree: Any) -> str:
  """128-bit hash of a pytree's array bits, as 32 hex digits.

  Each 32-bit pattern is mixed with its position and summed modulo 2**32, so the result is exact and
  the same for every sharding and summation order; one changed bit changes it. Not cryptographic.
  """
  words = np.asarray(jax.device_get(_fingerprint_words(tree)))
  return "".join(f"{int(w):08x}" for w in words)


@jax.jit
def _fingerprint_words(tree: Any) -> jax.Array:
  total = jnp.zeros(_WORDS, jnp.uint32)
  for i, leaf in enumerate(jax.tree.leaves(tree)):
    bits = _bits(leaf).reshape(-1)
    position = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(0x01000193)
    sums = [
      jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(odd)) ^ jnp.uint32(odd)), dtype=jnp.uint32)
      for odd in _ODD
    ]
    salt = jnp.uint32((i * 2 + 1) & 0xFFFFFFFF)
    total = total + _mix(jnp.stack(sums) + salt)
  return total


def _bits(x: jax.Array) -> jax.Array:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  if x.dtype.itemsize == 8:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """Murmur3's finaliser: every input bit reaches every output bit."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
