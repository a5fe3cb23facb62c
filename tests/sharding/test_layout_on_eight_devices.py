"""Shardings on a real mesh of eight devices. As a script: the checks, under forced devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import sharding
from agentjax.sharding import MeshConfig, make_mesh


@dataclasses.dataclass(frozen=True)
class Spec:
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]


def check_arrays_are_split_as_the_table_says():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  specs = {
    "table": Spec((32, 16), ("vocab", "embed")),
    "up": Spec((3, 16, 8), ("layers", "embed", "mlp")),
    "groups": Spec((16, 1, 5), ("embed", "mamba_groups", "mamba_state")),
    "norm": Spec((16,), (None,)),
  }
  shards = {"table": (16, 8), "up": (3, 8, 4), "groups": (8, 1, 5), "norm": (16,)}
  values = {
    k: np.random.default_rng(0).normal(size=s.shape).astype(np.float32) for k, s in specs.items()
  }
  placed = jax.device_put(values, sharding.shardings(specs, mesh))
  for name, array in placed.items():
    assert len(array.addressable_shards) == 8
    assert {s.data.shape for s in array.addressable_shards} == {shards[name]}, name
    np.testing.assert_array_equal(array, values[name])


def check_rows_and_time_of_a_batch_are_split():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, context=2))
  assert (sharding.row_multiple(mesh), sharding.time_multiple(mesh)) == (4, 2)
  ids = np.arange(8 * 6).reshape(8, 6)
  placed = sharding.upload(ids, sharding.batch_sharding(mesh))
  assert {s.data.shape for s in placed.addressable_shards} == {(2, 3)}
  np.testing.assert_array_equal(placed, ids)


def check_an_activation_is_pinned_inside_jit():
  mesh = make_mesh(MeshConfig(data=4, tensor=2, fsdp=1))

  @jax.jit
  def run(x):
    return sharding.constrain(2 * x, ("batch", "time", "mlp"), name="hidden")

  with jax.set_mesh(mesh):
    out = run(jnp.ones((8, 3, 6)))
  assert {s.data.shape for s in out.addressable_shards} == {(2, 3, 3)}


def check_a_part_of_the_devices_can_be_used():
  mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[4:])
  assert mesh.devices.shape == (1, 2, 1, 2, 1)
  assert {d.id for d in mesh.devices.flat} == {4, 5, 6, 7}


def test_shardings_hold_on_eight_devices(on_eight_devices):
  assert on_eight_devices(__file__).split() == ["8", "devices", "agree"]


if __name__ == "__main__":
  assert jax.device_count() == 8
  check_arrays_are_split_as_the_table_says()
  check_rows_and_time_of_a_batch_are_split()
  check_an_activation_is_pinned_inside_jit()
  check_a_part_of_the_devices_can_be_used()
  print("8 devices agree")
