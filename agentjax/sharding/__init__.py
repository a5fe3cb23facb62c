"""Where arrays live: the device mesh and the table from logical to mesh axes."""

from agentjax.sharding.fingerprint import fingerprint
from agentjax.sharding.layout import (
  LOGICAL_AXES,
  batch_sharding,
  constrain,
  fitting_spec,
  partition_spec,
  replicated,
  row_multiple,
  shardings,
  split_rows,
  time_multiple,
  upload,
  with_shardings,
)
from agentjax.sharding.mesh import MESH_AXES, MeshConfig, make_mesh
from agentjax.sharding.order import dispatching, in_order
from agentjax.sharding.shards import index, largest, on_shards, ways, whole

__all__ = [
  "LOGICAL_AXES",
  "MESH_AXES",
  "MeshConfig",
  "batch_sharding",
  "constrain",
  "dispatching",
  "fingerprint",
  "fitting_spec",
  "in_order",
  "index",
  "largest",
  "make_mesh",
  "on_shards",
  "partition_spec",
  "replicated",
  "row_multiple",
  "shardings",
  "split_rows",
  "time_multiple",
  "upload",
  "ways",
  "whole",
  "with_shardings",
]
