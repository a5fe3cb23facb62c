"""Devices of lanes: one each, or a mesh of them that shares the model and its slots.

A mesh may lie in several processes, each of which has as many of its devices. The first of them
then decides what its lanes do, and the others repeat it (``engine.mirror``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import check
from agentjax.engine.config import EngineConfig
from agentjax.sharding import MESH_AXES, in_order, make_mesh, upload


@dataclasses.dataclass(frozen=True)
class Home:
  """Devices of a lane.

  Attributes:
    devices: in the order of the mesh.
    mesh: over them; None for one device.
  """

  devices: tuple[jax.Device, ...]
  mesh: jax.sharding.Mesh | None = None

  @functools.cached_property
  def processes(self) -> tuple[int, ...]:
    """Whose devices these are."""
    return processes_of(self.devices)

  @property
  def local_devices(self) -> tuple[jax.Device, ...]:
    """Those of this process."""
    return tuple(d for d in self.devices if d.process_index == jax.process_index())

  def put(self, tree: Any, spec: Any = None) -> Any:
    """Puts arrays on the devices: split by a tree of specs; None: whole on each."""
    if self.mesh is None or spec is None:
      targets: Any = self.sharding(jax.P())
    else:
      targets = jax.tree.map(self.sharding, spec, is_leaf=_is_spec)
    if len(self.processes) == 1:
      return jax.device_put(tree, targets)
    if spec is None:
      targets = jax.tree.map(lambda _: targets, tree)
    return jax.tree.map(self._put, tree, targets)

  def _put(self, value: Any, target: jax.sharding.Sharding) -> jax.Array:
    """One array on devices of several processes, all of which call this."""
    if isinstance(value, jax.Array) and value.sharding.device_set != target.device_set:
      (value,) = jax.device_get(readable([value]))  # devices of processes send each other nothing
    return upload(value, target)

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


def processes_of(devices: Sequence[jax.Device]) -> tuple[int, ...]:
  """Whose devices these are."""
  return tuple(sorted({device.process_index for device in devices}))


def readable(arrays: Sequence[Any]) -> list[Any]:
  """Arrays of one mesh that this process can read; those spread over processes are made whole."""

  def split(v: Any) -> bool:
    return isinstance(v, jax.Array) and not (v.is_fully_addressable or v.is_fully_replicated)

  far = [v for v in arrays if split(v)]
  if not far:
    return list(arrays)
  made = iter(in_order(_make_whole(jax.sharding.NamedSharding(far[0].sharding.mesh, jax.P()))(far)))
  return [next(made) if split(v) else v for v in arrays]


@functools.cache
def _make_whole(target: jax.sharding.NamedSharding) -> Any:
  return jax.jit(lambda values: values, out_shardings=target)


def make_homes(config: EngineConfig, devices: Sequence[jax.Device] | None) -> list[Home]:
  """One home for every lane; lanes of one device each may share the device.

  Args:
    config: validated.
    devices: of this process, and of those that share its lanes; None is all of this process.

  Raises:
    ConfigError: there are too few devices.
  """
  places = list(devices or jax.local_devices())
  size = config.mesh.size
  processes = processes_of(places)
  check(
    len(processes) == config.processes,
    "engine.processes",
    config.processes,
    f"{len(processes)}, the number of processes whose devices sample together here",
  )
  if size == 1:
    return [Home((places[i % len(places)],)) for i in range(config.lanes)]
  check(
    size * config.lanes <= len(places),
    "engine.mesh",
    ", ".join(f"{axis}={n}" for axis, n in config.mesh.to_dict().items() if n > 1),
    f"lanes of so few devices that engine.lanes={config.lanes} of them fit on the {len(places)} "
    "that sample",
  )
  each = size // len(processes)
  of_processes = [[d for d in places if d.process_index == process] for process in processes]
  homes = []
  for i in range(config.lanes):
    own = [d for found in of_processes for d in found[i * each : (i + 1) * each]]
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
