"""From logical axis names to shardings: one table, and errors that name the array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Array = jax.Array

# A name that is not split stays here too, so that a misspelt one is an error.
LOGICAL_AXES: Mapping[str, tuple[str, ...]] = {
  # Parameters. Devices that share a row's time share the weights too.
  "vocab": ("tensor",),
  "embed": ("fsdp", "context"),
  "mlp": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "head_dim": (),
  # The narrow vectors of latent attention, of latent mixtures and of Gemma's layer inputs.
  "latent": ("fsdp", "context"),
  "mamba_heads": ("tensor",),
  "mamba_head_dim": (),
  "mamba_inner": ("tensor",),
  # Every head of a group reads the group's B and C, and there may be one group only.
  "mamba_groups": (),
  "mamba_state": (),
  "conv": (),
  "experts": ("expert",),
  "expert_mlp": ("tensor",),
  "layers": (),
  # Activations.
  "batch": ("data", "fsdp", "expert"),
  "time": ("context",),
  "stream": (),
}


def partition_spec(
  axes: Sequence[str | None],
  shape: Sequence[int],
  mesh: Mesh | AbstractMesh,
  *,
  name: str,
) -> PartitionSpec:
  """The mesh axes each dimension is split over; mesh axes of size 1 are left out.

  Args:
    axes: a key of ``LOGICAL_AXES`` per dimension, or None for a dimension that is never split.
    shape: sizes of the dimensions.
    mesh: with the axes of ``MESH_AXES``.
    name: of the array, for messages.

  Raises:
    ValueError: an unknown name, a dimension that does not divide, or two dimensions that want the
      same mesh axis.
  """
  if len(axes) != len(shape):
    raise ValueError(
      f"{name} has shape {tuple(shape)} but axes {tuple(axes)}; give one name or None for each "
      "dimension."
    )
  used: dict[str, str] = {}
  entries: list[str | tuple[str, ...] | None] = []
  for axis, size in zip(axes, shape, strict=True):
    if axis is not None and axis not in LOGICAL_AXES:
      raise ValueError(
        f"{name} has the unknown axis {axis!r}; allowed: {', '.join(LOGICAL_AXES)}, or None."
      )
    split = tuple(m for m in LOGICAL_AXES[axis] if mesh.shape[m] > 1) if axis else ()
    ways = math.prod(mesh.shape[m] for m in split)
    if size % ways:
      raise ValueError(
        f"{name}: its axis {axis!r} of size {size} does not divide over the {ways} devices of "
        f"mesh axes {', '.join(split)}. Make it a multiple of {ways}, or change "
        f"{' or '.join(f'config.mesh.{m}' for m in split)}."
      )
    for m in split:
      if m in used:
        raise ValueError(
          f"{name}: its axes {used[m]!r} and {axis!r} both want mesh axis {m!r}; name one of "
          "them differently, or None."
        )
      used[m] = str(axis)
    entries.append(split[0] if len(split) == 1 else split or None)
  return PartitionSpec(*entries)


def fitting_spec(
  axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
  """As ``partition_spec``, where a dimension that does not divide stays whole on every device."""
  kept = tuple(
    axis if axis and size % math.prod(mesh.shape[m] for m in LOGICAL_AXES[axis]) == 0 else None
    for axis, size in zip(axes, shape, strict=True)
  )
  return partition_spec(kept, shape, mesh, name="an array for sampling")


def shardings(specs: Any, mesh: Mesh) -> Any:
  """A ``NamedSharding`` for every array of a tree of specs.

  Args:
    specs: tree whose leaves have ``axes`` and ``shape``, as the models' ``ParamSpec``.
    mesh: to place them on.

  Raises:
    ValueError: as ``partition_spec``, naming the leaf by its path.
  """

  def place(path: tuple[Any, ...], spec: Any) -> NamedSharding:
    name = jax.tree_util.keystr(path).lstrip(".")
    return NamedSharding(mesh, partition_spec(spec.axes, spec.shape, mesh, name=name))

  return jax.tree_util.tree_map_with_path(place, specs, is_leaf=lambda v: hasattr(v, "axes"))


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """For [B, T, ...] arrays: rows over (data, fsdp, expert), time over context."""
  return NamedSharding(mesh, PartitionSpec(LOGICAL_AXES["batch"], LOGICAL_AXES["time"]))


def replicated(mesh: Mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def upload(values: Any, target: jax.sharding.Sharding) -> Array:
  """An array of the host on devices; each process sends what its own devices hold, no more.

  All processes have the same values. ``jax.device_put`` would compare them, NaN with NaN as well,
  by a program that gathers them on all devices. It moves what is on devices already.
  """
  if isinstance(values, jax.Array) or jax.process_count() == 1:
    return jax.device_put(values, target)
  return jax.make_array_from_callback(values.shape, target, values.__getitem__)


def row_multiple(mesh: Mesh) -> int:
  """The number of rows of a batch must be a multiple of this."""
  return math.prod(mesh.shape[axis] for axis in LOGICAL_AXES["batch"])


def time_multiple(mesh: Mesh) -> int:
  """The length of a batch's rows must be a multiple of this."""
  return math.prod(mesh.shape[axis] for axis in LOGICAL_AXES["time"])


def split_rows(tree: Any, rows: int) -> Any:
  """[M * rows, ...] arrays as [M, rows, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), tree)


def with_shardings(shapes: Any, targets: Any) -> Any:
  """Shapes and dtypes of a tree of arrays, with the shardings of a tree like it."""
  return jax.tree.map(
    lambda x, target: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target), shapes, targets
  )


def constrain(x: Array, axes: Sequence[str | None], *, name: str) -> Array:
  """Pins the layout of an activation inside jit to the table; without ``jax.set_mesh`` it is x.

  Raises:
    ValueError: as ``partition_spec``.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh, name=name))
