"""Pools of narrow numbers with one float32 scale a token and key head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

# Dtype of a quantised pool to the largest number it holds that is used.
QUANTISED = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantize_tokens(x: Array, dtype: str | jnp.dtype = "int8") -> tuple[Array, Array]:
  """``x`` as ``narrow * scales[..., None]`` with ``scales = max |x| / largest`` of the last axis.

  The error of a number is at most 1/254 of the largest of its vector in int8, and in float8_e4m3fn
  the larger of 1/16 of itself and 2^-10 / 448 of the largest. Both formats are exact in bfloat16.

  Args:
    x: [..., width] keys or values of any float dtype.
    dtype: one of ``QUANTISED``.

  Returns:
    The narrow numbers [..., width], and float32 scales [...]; 0 where all of x is.

  Raises:
    ValueError: another dtype.
  """
  numbers, scales = quantize(x, dtype, (-1,))
  return numbers, scales[..., 0]


def quantize(x: Array, dtype: str | jnp.dtype, axes: tuple[int, ...]) -> tuple[Array, Array]:
  """The same with one scale along ``axes``, which stay in the shape of the scales, as 1."""
  dtype = jnp.dtype(dtype)
  if dtype.name not in QUANTISED:
    raise ValueError(f"quantize: dtype={dtype.name!r}; allowed: {', '.join(map(repr, QUANTISED))}.")
  x = x.astype(jnp.float32)
  scales = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / QUANTISED[dtype.name]
  scaled = x / jnp.where(scales > 0, scales, 1.0)
  if dtype == jnp.int8:
    scaled = jnp.round(scaled)
  return scaled.astype(dtype), scales
