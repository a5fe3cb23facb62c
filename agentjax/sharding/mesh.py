"""The device mesh and its settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from agentjax.config import Config, ConfigError, check

MESH_AXES = ("data", "fsdp", "expert", "tensor", "context")


@dataclasses.dataclass(unsafe_hash=True)
class MeshConfig(Config):
  """Devices along each mesh axis; their product is the number of devices.

  One axis may be -1: it takes the devices the others leave.

  Attributes:
    data: copies of the parameters, each with its own rows of the batch.
    fsdp: parameters and optimiser state are split, rows of the batch too; weights are gathered
      where they are used.
    expert: experts of mixture blocks are split, rows of the batch too; tokens travel to the owner
      of their expert. All other parameters are copied along it.
    tensor: heads, hidden units and the vocabulary are split.
    context: the time axis of the batch is split, and parameters as over fsdp.
  """

  data: int = 1
  fsdp: int = -1
  expert: int = 1
  tensor: int = 1
  context: int = 1

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for axis in MESH_AXES:
      size = getattr(self, axis)
      check(size >= 1 or size == -1, f"{path}.{axis}", size, "at least 1, or -1 for the rest")
    free = [axis for axis in MESH_AXES if getattr(self, axis) == -1]
    if len(free) > 1:
      raise ConfigError(
        f"{path} has -1 for {' and '.join(free)}; allowed: at most one axis takes the rest."
      )

  @property
  def size(self) -> int:
    """Devices of a mesh without -1."""
    return math.prod(getattr(self, axis) for axis in MESH_AXES)

  def sizes(self, num_devices: int, path: str = "config.mesh") -> dict[str, int]:
    """Devices along each axis when there are ``num_devices``.

    Raises:
      ConfigError: the product of the axes cannot be ``num_devices``.
    """
    self.validate(path)
    sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = next((axis for axis, size in sizes.items() if size == -1), None)
    if num_devices % fixed or (free is None and fixed != num_devices):
      shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
      wanted = f"{fixed}" if free is None else f"a multiple of {fixed}"
      raise ConfigError(
        f"{path} ({shown}) needs {wanted} devices, got {num_devices}. Change an axis, or set one "
        "to -1 to take the rest."
      )
    if free is not None:
      sizes[free] = num_devices // fixed
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """Lays the devices out along ``MESH_AXES``, all of them axes the compiler partitions over (Auto).

  Args:
    config: sizes of the axes.
    devices: those to use; None is all devices of all processes.

  Raises:
    ConfigError: the sizes do not fit the devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = config.sizes(len(devices))
  try:
    return jax.make_mesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
      devices=devices,
    )
  except NotImplementedError as error:
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    raise ConfigError(
      f"a mesh of {shown} does not lie on these devices; allowed: axes that are products of whole "
      "axes of their torus, as 8 or 64 on 8x8x8."
    ) from error
