"""Code that runs on each device's part of the arrays, and its communication with other devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentjax.sharding.layout import LOGICAL_AXES, partition_spec

Array = jax.Array


def on_shards(
  function: Callable[..., Array],
  arguments: Sequence[tuple[Any, Sequence[str | None] | None]],
  out_axes: Sequence[str | None],
  *,
  name: str,
) -> Array:
  """``function`` of each device's parts of the arguments, under ``jax.shard_map``.

  Kernels need this, because the compiler cannot split them, and so does code that reaches across
  time. With no mesh, or a mesh of one device, it is a plain call.

  Args:
    function: its arguments are the device's parts, its result a part of the whole.
    arguments: pairs of an array and its logical axes (see ``LOGICAL_AXES``), or of a tree and a
      function ``mesh -> tree of PartitionSpec``.
    out_axes: logical axes of the result.
    name: of the computation, for messages.

  Raises:
    ValueError: an axis that does not divide over its mesh axes.
  """
  values = [value for value, _ in arguments]
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(*values)

  def spec(value: Any, axes: Any) -> Any:
    if callable(axes):
      return axes(mesh)
    return partition_spec(axes, value.shape, mesh, name=f"an argument of {name}")

  split = {m for axis in out_axes if axis for m in LOGICAL_AXES[axis] if mesh.shape[m] > 1}
  out = [
    tuple(m for m in LOGICAL_AXES[axis] if m in split) or None if axis else None
    for axis in out_axes
  ]
  return jax.shard_map(
    function,
    in_specs=tuple(spec(*argument) for argument in arguments),
    out_specs=jax.sharding.PartitionSpec(*out),
    check_vma=False,
  )(*values)


def ways(axis: str) -> int:
  """Devices that a logical axis is split over; 1 without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else math.prod(mesh.shape[m] for m in LOGICAL_AXES[axis])


def index(axis: str) -> Array:
  """Which part of a logical axis this device holds, int32 [], inside ``on_shards``."""
  return jax.lax.axis_index(LOGICAL_AXES[axis]) if ways(axis) > 1 else jnp.zeros((), jnp.int32)


def whole(x: Array) -> Array:
  """[B, T, ...] with all of time, gathered from the shards, inside ``on_shards``."""
  if ways("time") == 1:
    return x
  return jax.lax.all_gather(x, LOGICAL_AXES["time"], axis=1, tiled=True)


def largest(x: Array, axes: Sequence[str]) -> Array:
  """Elementwise maximum over the devices along some logical axes, inside ``on_shards``."""
  split = tuple(m for axis in axes if ways(axis) > 1 for m in LOGICAL_AXES[axis])
  return jax.lax.pmax(x, split) if split else x
