"""Boxes, frames and paths on the plane.

A pose is (x, y, heading), a size (length, width); metres and radians. Leading axes broadcast.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def boxes_overlap(
  pose: Float[Array, "*lead 3"],
  size: Float[Array, "*lead 2"],
  other: Float[Array, "*lead 3"],
  other_size: Float[Array, "*lead 2"],
) -> Bool[Array, "*lead"]:
  """Whether two rectangles touch: none of the four directions of their sides separates them."""
  across = other[..., :2] - pose[..., :2]
  turn = other[..., 2] - pose[..., 2]
  cos, sin = jnp.abs(jnp.cos(turn)), jnp.abs(jnp.sin(turn))

  def separated(heading: Array, own: Array, its: Array) -> Array:
    offset = jnp.abs(_turned(across, -heading))
    length, width = its[..., 0], its[..., 1]
    reach = jnp.stack([cos * length + sin * width, sin * length + cos * width], axis=-1)
    return jnp.any(offset > (own + reach) / 2, axis=-1)

  apart = separated(pose[..., 2], size, other_size) | separated(other[..., 2], other_size, size)
  return ~apart


def into_frame(
  points: Float[Array, "*lead 2"], pose: Float[Array, "*lead 3"]
) -> Float[Array, "*lead 2"]:
  """Points as someone at ``pose`` sees them: x is ahead, y to the left."""
  return _turned(points - pose[..., :2], -pose[..., 2])


def out_of_frame(
  points: Float[Array, "*lead 2"], pose: Float[Array, "*lead 3"]
) -> Float[Array, "*lead 2"]:
  """Inverse of ``into_frame``."""
  return _turned(points, pose[..., 2]) + pose[..., :2]


def path_lengths(points: Float[Array, "points 2"]) -> Float[Array, " points"]:
  """Distance from the first point to each, along the path."""
  pieces = jnp.linalg.norm(jnp.diff(points, axis=0), axis=-1)
  return jnp.concatenate([jnp.zeros(1, points.dtype), jnp.cumsum(pieces)])


def at_length(
  points: Float[Array, "points 2"], length: Float[Array, "*shape"]
) -> Float[Array, "*shape 2"]:
  """Where a path is after some length; beyond its end it goes straight on.

  The direction beyond is that of the last piece; from the first point to the last where that is
  too short; x if the whole path is.
  """
  lengths = path_lengths(points)
  ahead = jnp.array([1.0, 0.0])
  for begin in (0, -2):
    span = points[-1] - points[begin]
    distance = jnp.linalg.norm(span)
    ahead = jnp.where(distance > 0.1, span / jnp.maximum(distance, 0.1), ahead)
  inside = [jnp.interp(length, lengths, points[:, axis]) for axis in (0, 1)]
  beyond = jnp.maximum(length - lengths[-1], 0.0)
  return jnp.stack(inside, axis=-1) + beyond[..., None] * ahead


def _turned(vectors: Array, angle: Array) -> Array:
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  x, y = vectors[..., 0], vectors[..., 1]
  return jnp.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)
