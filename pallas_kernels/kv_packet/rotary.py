"""Rotary embedding of keys, and the turn of keys that are already rotated."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


class Rotary(NamedTuple):
  """Which channels of a key a rotary embedding turns, and how fast.

  Attributes:
    frequencies: float32 [n], radians a token of each pair of channels; 0 leaves a pair alone.
    first: channel at which the 2 n channels of the pairs begin.
    interleaved: pair i is channels 2i and 2i + 1 from there on; else i and i + n.
  """

  frequencies: np.ndarray
  first: int = 0
  interleaved: bool = False


def partner(x: Array, rotary: Rotary) -> Array:
  """``turn(x, n)`` is ``x cos + partner(x) sin`` with the two of ``factors(n)``; exact."""
  width, first = 2 * len(rotary.frequencies), rotary.first
  own = x[..., first : first + width]
  axis = -1 if rotary.interleaved else -2
  pairs = own.reshape(*own.shape[:-1], *((-1, 2) if rotary.interleaved else (2, width // 2)))
  one, other = (jax.lax.index_in_dim(pairs, i, axis, keepdims=False) for i in range(2))
  swapped = jnp.stack([-other, one], axis=axis).reshape(own.shape)
  around = [(0, 0)] * (x.ndim - 1) + [(first, x.shape[-1] - first - width)]
  return jnp.pad(swapped, around)


def factors(steps: Array, rotary: Rotary, width: int) -> tuple[Array, Array]:
  """Float32 [..., width] each: see ``partner``; 1 and 0 at channels that are not turned."""
  angle = steps[..., None].astype(jnp.float32) * rotary.frequencies
  if rotary.interleaved:
    angle = jnp.repeat(angle, 2, axis=-1)
  else:
    angle = jnp.concatenate([angle, angle], axis=-1)
  behind = width - rotary.first - angle.shape[-1]
  angle = jnp.pad(angle, [(0, 0)] * (angle.ndim - 1) + [(rotary.first, behind)])
  return jnp.cos(angle), jnp.sin(angle)


def turn(x: Array, steps: Array, rotary: Rotary) -> Array:
  """Turns each pair of channels by ``steps * frequency``, in float32, in the dtype of x.

  Turns add up: what was turned by m and then by n is what was turned by m + n, up to the rounding
  of angles, which is that of the angle ``steps * frequency`` in float32. By 0 steps no bit changes.

  Args:
    x: [..., width]; other channels than the pairs' stay.
    steps: int; it and the axes of x before the last are broadcast to each other.
    rotary: of these channels.
  """
  x = jnp.broadcast_to(x, (*jnp.broadcast_shapes(x.shape[:-1], steps.shape), x.shape[-1]))
  width, first = 2 * len(rotary.frequencies), rotary.first
  if width < x.shape[-1]:
    turned = turn(x[..., first : first + width], steps, rotary._replace(first=0))
    return jnp.concatenate([x[..., :first], turned, x[..., first + width :]], axis=-1)
  angle = steps[..., None].astype(jnp.float32) * rotary.frequencies
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  axis = -1 if rotary.interleaved else -2
  pairs = x.astype(jnp.float32).reshape(
    *x.shape[:-1], *((-1, 2) if rotary.interleaved else (2, width // 2))
  )
  one, other = (jax.lax.index_in_dim(pairs, i, axis, keepdims=False) for i in range(2))
  turned = jnp.stack([one * cos - other * sin, other * cos + one * sin], axis=axis)
  return turned.reshape(x.shape).astype(x.dtype)
