"""Ahead-of-time compilation of a function for one chip of each TPU generation."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

# Chip -> the smallest topology libtpu describes it by.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
CHIPS = tuple(TOPOLOGIES)

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@functools.cache
def device(chip: str) -> jax.Device:
  """One device of a chip of ``CHIPS``, for compilation only; no TPU is looked for."""
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
  return described.devices[0]


def compile_for(
  chip: str, function: Callable[..., object], *arguments: jax.ShapeDtypeStruct
) -> jax.stages.Compiled:
  """``jax.jit(function)`` of such arguments (trees of them too), compiled for one device."""
  sharding = SingleDeviceSharding(device(chip))
  placed = jax.tree.map(
    lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding), arguments
  )
  return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()
