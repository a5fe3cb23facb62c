"""Devices of lanes: one each, or a mesh of them that shares the model and its slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import check
from agentjax.engine.config import EngineConfig
from agentjax.sharding import MESH_AXES, make_mesh


@dataclasses.dataclass(frozen=True)
class Home:
  """Devices of a lane.

  Attributes:
    devices: of this process, in the order of the mesh.
    mesh: over them; None for one device.
  """

  devices: tuple[jax.Device, ...]
  mesh: jax.sharding.Mesh | None = None

  def put(self, tree: Any, spec: Any = None) -> Any:
    """Puts arrays on the devices: split by a tree of specs; None: whole on each."""
    if self.mesh is None or spec is None:
      return jax.device_put(tree, self.sharding(jax.P()))
    return jax.device_put(tree, jax.tree.map(self.sharding, spec, is_leaf=_is_spec))

  def on(self, devices: Sequence[jax.Device]) -> Home:
    """A home like this one on other devices, as many."""
    if self.mesh is None:
      return Home(tuple(devices))
    own = self.mesh
    places = np.array(devices).reshape(own.devices.shape)
    return Home(
      tuple(devices), jax.sharding.Mesh(places, own.axis_names, axis_types=own.axis_types)
    )

  def sharding(self, spec: jax.P) -> jax.sharding.Sharding:
    """The sharding of an array with this spec."""
    if self.mesh is None:
      return jax.sharding.SingleDeviceSharding(self.devices[0])
    return jax.sharding.NamedSharding(self.mesh, spec)


def make_homes(config: EngineConfig, devices: Sequence[jax.Device] | None) -> list[Home]:
  """One home for every lane; lanes of one device each may share the device.

  Args:
    config: validated.
    devices: of this process; None is all of them.

  Raises:
    ConfigError: there are too few devices.
  """
  places = list(devices or jax.local_devices())
  size = config.mesh.size
  if size == 1:
    return [Home((places[i % len(places)],)) for i in range(config.lanes)]
  check(
    size * config.lanes <= len(places),
    "engine.mesh",
    ", ".join(f"{axis}={n}" for axis, n in config.mesh.to_dict().items() if n > 1),
    f"lanes of so few devices that engine.lanes={config.lanes} of them fit on the {len(places)} "
    "that sample",
  )
  homes = []
  for i in range(config.lanes):
    own = places[i * size : (i + 1) * size]
    mesh = make_mesh(config.mesh, own)
    homes.append(Home(tuple(mesh.devices.flat), mesh))
  return homes


def _is_spec(value: Any) -> bool:
  return isinstance(value, jax.P)


def lanes_mesh(home: Home, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
  """Devices of several homes, each like ``home``, as one mesh with a first axis "lanes"."""
  shape = (1,) * len(MESH_AXES) if home.mesh is None else tuple(home.mesh.shape.values())
  return jax.sharding.Mesh(
    np.array(devices).reshape(-1, *shape),
    ("lanes", *MESH_AXES),
    axis_types=(jax.sharding.AxisType.Auto,) * (1 + len(MESH_AXES)),
  )
