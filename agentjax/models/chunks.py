"""Functions along the time axis, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def map_time(
  function: Callable[[tuple[Array, ...]], Any], given: Sequence[Array], size: int
) -> Any:
  """``function`` of arrays [B, size, ...] of ``given`` [B, T, ...], one chunk after the other.

  The last chunk is padded with zeros. Results are a pytree of arrays [B, T, ...].
  """
  batch, time = given[0].shape[:2]
  count = -(-time // size)

  def cut(x: Array) -> Array:
    padded = jnp.pad(x, [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(batch, count, size, *x.shape[2:]), 1, 0)

  def join(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :time]

  return jax.tree.map(join, jax.lax.map(function, tuple(cut(x) for x in given)))
