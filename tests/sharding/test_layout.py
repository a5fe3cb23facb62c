"""Logical axes to partition specs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from agentjax import sharding
from agentjax.sharding import LOGICAL_AXES, MESH_AXES, MeshConfig, make_mesh, partition_spec


def abstract_mesh(**sizes: int) -> AbstractMesh:
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclasses.dataclass(frozen=True)
class Spec:
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]


def test_the_table_speaks_of_mesh_axes_only():
  for axes in LOGICAL_AXES.values():
    assert set(axes) <= set(MESH_AXES)


@pytest.mark.parametrize(
  ("axes", "shape", "expected"),
  [
    (("vocab", "embed"), (32, 16), PartitionSpec("tensor", "fsdp")),
    (("layers", "embed", "mlp"), (3, 16, 64), PartitionSpec(None, "fsdp", "tensor")),
    (("heads", "head_dim", "embed"), (4, 7, 16), PartitionSpec("tensor", None, "fsdp")),
    (("embed", "mamba_groups", "mamba_state"), (16, 1, 5), PartitionSpec("fsdp", None, None)),
    (("conv", "mamba_inner"), (4, 64), PartitionSpec(None, "tensor")),
    (("experts", "embed", "expert_mlp"), (9, 16, 8), PartitionSpec(None, "fsdp", "tensor")),
    (("batch", "time", None), (8, 5, 3), PartitionSpec(("data", "fsdp"), None, None)),
    ((None,), (3,), PartitionSpec(None)),
    ((), (), PartitionSpec()),
  ],
)
def test_axes_go_where_the_table_says_and_size_one_axes_are_left_out(axes, shape, expected):
  mesh = abstract_mesh(data=2, fsdp=2, tensor=2)
  assert partition_spec(axes, shape, mesh, name="w") == expected


def test_experts_and_time_have_mesh_axes_of_their_own():
  mesh = abstract_mesh(expert=4, context=2)
  assert partition_spec(("experts", "embed"), (8, 4), mesh, name="w") == PartitionSpec(
    "expert", "context"
  )
  assert partition_spec(("batch", "time"), (8, 8), mesh, name="w") == PartitionSpec(
    "expert", "context"
  )


def test_rows_are_split_over_all_axes_but_tensor_and_context():
  mesh = abstract_mesh(data=2, fsdp=2, expert=2, tensor=2, context=2)
  rows, weights = ("data", "fsdp", "expert"), ("fsdp", "context")
  assert partition_spec(("embed", "mlp"), (8, 8), mesh, name="w") == PartitionSpec(
    weights, "tensor"
  )
  assert partition_spec(("batch", "time"), (8, 8), mesh, name="w") == PartitionSpec(rows, "context")
  assert (sharding.row_multiple(mesh), sharding.time_multiple(mesh)) == (8, 2)


@pytest.mark.parametrize(
  ("axes", "shape", "message"),
  [
    (("embed", "mpl"), (16, 16), "w has the unknown axis 'mpl'; allowed: vocab, "),
    (("embed",), (16, 16), r"w has shape \(16, 16\) but axes \('embed',\)"),
    (("kv_heads",), (3,), "w: its axis 'kv_heads' of size 3 .* 2 devices .*config.mesh.tensor"),
    (("batch",), (6,), "size 6 .* 4 devices of mesh axes data, fsdp"),
    (("heads", "mlp"), (4, 4), "axes 'heads' and 'mlp' both want mesh axis 'tensor'"),
  ],
)
def test_what_cannot_be_split_is_an_error_that_names_the_array(axes, shape, message):
  with pytest.raises(ValueError, match=message):
    partition_spec(axes, shape, abstract_mesh(data=2, fsdp=2, tensor=2), name="w")


def test_errors_name_a_leaf_by_its_path():
  specs = {"block": [Spec((16,), ("embed",)), Spec((4, 4), ("heads", "mpl"))]}
  with pytest.raises(ValueError, match=r"\['block'\]\[1\] has the unknown axis 'mpl'"):
    sharding.shardings(specs, make_mesh(MeshConfig(), jax.devices()[:1]))


def test_on_one_device_any_size_fits():
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  specs = {"w": Spec((3, 5), ("embed", "mlp")), "b": Spec((7,), (None,))}
  placed = sharding.shardings(specs, mesh)
  assert placed["w"].is_fully_replicated and placed["b"].is_fully_replicated
  assert (sharding.row_multiple(mesh), sharding.time_multiple(mesh)) == (1, 1)


def test_constrain_changes_no_value_with_or_without_a_mesh():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 7)), jnp.float32)

  @jax.jit
  def run(x):
    return sharding.constrain(x, ("batch", "time", "stream"), name="x")

  np.testing.assert_array_equal(run(x), x)
  with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
    np.testing.assert_array_equal(run(x), x)
