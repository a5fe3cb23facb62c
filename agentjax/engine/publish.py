"""Moves weights from the layout of training to that of the lanes that sample."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentjax.engine.home import Home, lanes_mesh, processes_of
from agentjax.engine.programs import Programs
from agentjax.models import DecodeParams, Params
from agentjax.models.lora import Shared, join_adapters, split_adapters
from agentjax.sharding import dispatching, fingerprint, in_order

# Most bytes of a lane's device that one program lays out anew, on all lanes; ours.
_AT_ONCE = 2**30


@dataclasses.dataclass(frozen=True)
class Weights:
  """Published parameters on the devices of a lane."""

  params: DecodeParams | Shared  # Shared: several policies share a base
  versions: tuple[int, ...]  # of each policy; -1 before its first publication
  publications: tuple[int, ...]  # how often each was published, its base included


class PublishError(RuntimeError):
  """Weights did not arrive as they were sent."""


class Publisher:
  """Lays training parameters out for lanes: cast first, then moved, shard to shard.

  Adapters stay separate from their weights. While the weights keep the fingerprint that they were
  sent with, and were not released, only the adapters are sent. Several policies with adapters share
  the weights; a policy that was not published yet has adapters of zero.

  One compiled program lays all weights out for lanes; a large model takes a few programs in turn.
  If the lanes of all processes live on the devices that train, the weights are where they belong.
  Else ``jax.device_put`` sends them on, one call a program and lane, shard to shard. No device ever
  holds more of the model than its part in either layout.

  Args:
    programs: of each home; all meshes have one shape.
    policies: their number.

  Attributes:
    nbytes: bytes of all copies that the last call laid out, over all homes.
    seconds: wall seconds that it took.
  """

  def __init__(self, programs: dict[Home, Programs], policies: int = 1) -> None:
    self._homes = list(programs)
    self._programs = next(iter(programs.values()))
    self._split = self._programs.mesh is not None
    self._versions, self._publications = [-1] * policies, [0] * policies
    self._adapters: list[dict[Home, Any] | None] = [None] * policies
    self._tree: Any = None  # structure of what was published
    self._mark = ""  # fingerprint of what adapters are added to
    self._base: dict[Home, DecodeParams] | None = None  # that, where it was sent and is kept
    self.nbytes, self.seconds = 0, 0.0

  def __call__(self, params: Params, version: int, policy: int = 0) -> dict[Home, Weights]:
    """Copies training parameters, in any sharding, to every home.

    If arrays span processes, all processes must call this together. ``policy`` is a number.

    Raises:
      PublishError: a copy on a mesh differs from what was sent; or, which nothing is compiled for,
        other arrays have adapters than before, or none have and policies share a base.
    """
    start, programs, self.nbytes = time.perf_counter(), self._programs, 0
    tree = jax.tree.structure(params)
    if self._tree is not None and tree != self._tree:
      raise PublishError(
        "other arrays of these weights have adapters than of those before; allowed: an engine for "
        "each config.lora."
      )
    base, adapters = split_adapters(params)
    if len(self._versions) > 1 and adapters is None:
      raise PublishError(
        f"{len(self._versions)} policies share this engine, and these weights have no adapters; "
        "allowed: config.lora, or an engine for each policy."
      )
    with dispatching():
      if adapters is None:
        copies = self._send(programs.prepare(base), programs.params_spec)
      else:
        mark = fingerprint(base)
        if mark != self._mark:
          self._mark, self._base = mark, None
          self._publications = [count + 1 for count in self._publications]
        if self._base is None:
          self._base = self._send(programs.prepare(base), programs.params_spec)
        spec = programs.placed_spec(adapters) if self._split else None
        changed = self._send(programs.prepare_adapters(adapters), spec)
        self._adapters[policy] = changed
        copies = {home: self._join(home, w) for home, w in self._base.items()}
    self._tree, self._versions[policy] = tree, version
    self._publications[policy] += 1
    self.seconds = time.perf_counter() - start
    counted = tuple(self._versions), tuple(self._publications)
    return {home: Weights(copy, *counted) for home, copy in copies.items()}

  def release(self) -> None:
    """Lets go of the weights below the adapters; the next call sends them again."""
    self._base = None

  def _join(self, home: Home, base: DecodeParams) -> DecodeParams | Shared:
    """The base with the adapters of all policies."""
    every = [None if of is None else of[home] for of in self._adapters]
    if len(every) == 1:
      return join_adapters(base, every[0])
    some = next(of for of in every if of is not None)
    empty = jax.tree.map(lambda w: jnp.zeros_like(w, device=w.sharding), some)
    return Shared(base, tuple(empty if of is None else of for of in every))

  def _send(self, prepared: Any, spec: Any) -> dict[Home, Any]:
    """Copies of arrays for every home, split by a tree of specs."""
    leaves, tree = jax.tree.flatten(in_order(prepared))
    specs: Sequence[jax.P] = [jax.P()] * len(leaves)
    if spec is not None:
      specs = jax.tree.leaves(spec, is_leaf=lambda v: isinstance(v, jax.P))
    copies = self._move(leaves, specs)
    if self._split:
      self._verify(leaves, copies)
    jax.block_until_ready(list(copies.values()))
    self.nbytes += sum(
      shard.data.nbytes
      for copy in copies.values()
      for leaf in copy
      for shard in leaf.addressable_shards
    )
    return {home: jax.tree.unflatten(tree, copy) for home, copy in copies.items()}

  def _move(
    self, leaves: Sequence[jax.Array], specs: Sequence[jax.P]
  ) -> dict[Home, list[jax.Array]]:
    training = leaves[0].sharding.device_set
    if len(training) == 1:
      return {home: home.put(list(leaves), list(specs)) for home in self._homes}
    route = find_route(self._homes, [d for d in jax.devices() if d in training])
    targets = [jax.sharding.NamedSharding(route.mesh, spec) for spec in specs]
    copies: dict[Home, list[jax.Array]] = {home: [] for home in self._homes}
    for part in portions(leaves, route.size):
      moved = in_order(_reshard(leaves[part], targets[part]))
      laid = [_part(moved, block, specs[part]) for block in route.blocks]
      for i, (home, copy) in enumerate(copies.items()):
        copy += _carry(laid[i % len(laid)], [home.sharding(s) for s in specs[part]])
      if not route.direct:  # the next part needs the room
        jax.block_until_ready(list(copies.values()))
    return copies

  def _verify(self, sent: Sequence[jax.Array], copies: dict[Home, list[jax.Array]]) -> None:
    wanted = fingerprint(list(sent))
    for home, copy in copies.items():
      found = fingerprint(copy)
      if found != wanted:
        raise PublishError(
          f"the weights on {', '.join(map(str, home.devices))} have the fingerprint {found} and "
          f"those that were sent {wanted}: devices or their links are at fault; restart the run, "
          "which goes on from its last checkpoint."
        )


class Route(NamedTuple):
  """How weights get from the devices that train to the lanes.

  A program lays them out on the devices that train, as blocks of these would need them if they were
  lanes. From there every device of a lane gets the part of one device as it is.

  Attributes:
    mesh: all devices that train, block by block.
    blocks: of this process, and of those that share its lanes.
    direct: whether its blocks are its lanes.
  """

  mesh: jax.sharding.Mesh
  blocks: Sequence[Home]
  direct: bool

  @property
  def size(self) -> int:
    """Devices of a block: as many lanes as there are, each gets all that moves at once."""
    return len(self.blocks[0].devices)


def find_route(homes: Sequence[Home], training: Sequence[jax.Device]) -> Route:
  """The way of weights to lanes.

  Args:
    homes: of this process; other processes have the like.
    training: of all processes, in the order of ``jax.devices()``.

  Raises:
    PublishError: lanes span processes, and these train on other devices that do not make whole
      lanes, with as many of them in each process.
  """
  own, together = [device for home in homes for device in home.devices], len(homes[0].processes)
  by_group: dict[int, list[jax.Device]] = {}
  for device in training:
    by_group.setdefault(device.process_index // together, []).append(device)
  here = by_group.get(own[0].process_index // together, [])
  parts = [part for _, part in sorted(by_group.items())]
  if set(here) == set(own) and len({len(part) for part in parts}) == 1:
    places = {device: i for i, device in enumerate(here)}
    order = [places[device] for device in own]
    mesh = lanes_mesh(homes[0], [part[i] for part in parts for i in order])
    return Route(mesh, homes, True)
  like, size = homes[0], len(homes[0].devices)
  if together > 1:
    parts = [_as_lanes(part, homes[0]) for part in parts]
    here = _as_lanes(here, homes[0])
  elif any(len(part) % size for part in parts):  # then each device has arrays whole, for a while
    like, size = Home((here[0],)), 1
  blocks = [like.on(here[i : i + size]) for i in range(0, len(here), size)]
  return Route(lanes_mesh(like, [d for part in parts for d in part]), blocks, False)


def _as_lanes(devices: Sequence[jax.Device], home: Home) -> list[jax.Device]:
  """Devices of several processes, in blocks in which each has the places that it has in a lane."""
  of_lane = [home.processes.index(device.process_index) for device in home.devices]
  processes = processes_of(devices)
  queues = [[d for d in devices if d.process_index == process] for process in processes]
  each = len(of_lane) // len(home.processes)
  lengths = {len(queue) for queue in queues}
  if len(queues) != len(home.processes) or len(lengths) > 1 or lengths.pop() % each:
    raise PublishError(
      f"lanes of {len(home.processes)} processes take {each} devices of each, and the devices that "
      f"train are {[len(queue) for queue in queues]} in the processes {list(processes)}; allowed: "
      "config.devices.training in whole lanes, or engine.processes=1."
    )
  blocks = len(devices) // len(of_lane)
  return [queues[process].pop(0) for _ in range(blocks) for process in of_lane]


def _carry(
  values: Sequence[jax.Array], targets: Sequence[jax.sharding.Sharding]
) -> list[jax.Array]:
  """Arrays on the devices of other meshes of the same shape; every shard stays in its process."""
  if all(v.is_fully_addressable for v in values):
    return jax.device_put(list(values), list(targets))
  carried: list[jax.Array] = []
  for value, target in zip(values, targets, strict=True):
    source = value.sharding
    assert isinstance(source, jax.sharding.NamedSharding)
    assert isinstance(target, jax.sharding.NamedSharding)
    place = dict(zip(source.mesh.devices.flat, target.mesh.devices.flat, strict=True))
    shards = [jax.device_put(s.data, place[s.device]) for s in value.addressable_shards]
    carried.append(jax.make_array_from_single_device_arrays(value.shape, target, shards))
  return carried


def portions(arrays: Sequence[Any], devices: int) -> list[slice]:
  """Slices of arrays to move at once, as a program's temporaries grow with what it moves."""
  ends, size = [0], 0
  for i, array in enumerate(arrays):
    nbytes = array.size * array.dtype.itemsize
    if size and size + nbytes > _AT_ONCE * devices:
      ends.append(i)
      size = 0
    size += nbytes
  return [slice(a, b) for a, b in itertools.pairwise((*ends, len(arrays)))]


def _reshard(leaves: Sequence[jax.Array], targets: Sequence[jax.sharding.NamedSharding]) -> Any:
  """Lays arrays out anew on the same devices."""
  mesh = targets[0].mesh
  assert isinstance(mesh, jax.sharding.Mesh)
  if not all(isinstance(leaf.sharding, jax.sharding.NamedSharding) for leaf in leaves):
    return jax.device_put(tuple(leaves), tuple(targets))
  # A program has one order of devices, so shards change places first.
  ordered = [reordered(leaf.sharding, mesh) for leaf in leaves]
  return reshard_program(tuple(targets))(jax.device_put(tuple(leaves), tuple(ordered)))


def reordered(sharding: Any, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """A ``NamedSharding`` with the same parts, its devices in the order of another mesh."""
  own = sharding.mesh
  if tuple(own.devices.flat) == tuple(mesh.devices.flat):
    return sharding
  devices = mesh.devices.reshape(own.devices.shape)
  return jax.sharding.NamedSharding(
    jax.sharding.Mesh(devices, own.axis_names, axis_types=own.axis_types), sharding.spec
  )


@functools.lru_cache(maxsize=256)
def reshard_program(targets: tuple[jax.sharding.NamedSharding, ...]) -> Any:
  """The jitted function that lays a tuple of arrays out as ``targets``."""

  def move(values: Sequence[jax.Array]) -> list[jax.Array]:
    # Split over all devices first, else the compiler makes most arrays whole on the way.
    return [
      jax.lax.with_sharding_constraint(value, _split_most(target, value.shape))
      for value, target in zip(values, targets, strict=True)
    ]

  return jax.jit(move, out_shardings=list(targets))


def _split_most(
  target: jax.sharding.NamedSharding, shape: tuple[int, ...]
) -> jax.sharding.NamedSharding:
  """``target``, with the axes that it copies along added to a dimension that they divide."""
  mesh, spec = target.mesh, list(target.spec) + [None] * (len(shape) - len(target.spec))
  used = {axis for entry in spec for axis in _axes(entry)}
  spare = tuple(a for a, size in mesh.shape.items() if size > 1 and a not in used)
  for i, size in enumerate(shape):
    axes = (*_axes(spec[i]), *spare)
    if spare and size % math.prod(mesh.shape[a] for a in axes) == 0:
      return jax.sharding.NamedSharding(mesh, jax.P(*spec[:i], axes, *spec[i + 1 :]))
  return target


def _axes(entry: Any) -> tuple[str, ...]:
  """Mesh axes of an entry of a spec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _part(moved: Sequence[jax.Array], home: Home, specs: Sequence[jax.P]) -> list[jax.Array]:
  """The shards on the devices of one home, as arrays of that home."""
  part: list[jax.Array] = []
  for value, spec in zip(moved, specs, strict=True):
    found = {shard.device: shard.data for shard in value.addressable_shards}
    shards = [found[device] for device in home.devices if device in found]
    part.append(jax.make_array_from_single_device_arrays(value.shape, home.sharding(spec), shards))
  return part
