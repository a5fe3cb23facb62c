"""Lanes on several devices, and weights that are sharded over devices or over processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.training.figures import free_address

_ROOT = pathlib.Path(__file__).resolve().parents[2]

_COMMON = """
import asyncio, sys
import jax, numpy as np
from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest, address_key

config = models.ModelConfig(vocab_size=16, d_model=8, pattern="*-", num_heads=1, num_kv_heads=1,
                            head_dim=8, d_mlp=8)

def sampled(params, lanes, devices=None, **settings):
  engine = Engine(config, EngineConfig(slots=2 * lanes, lanes=lanes, max_length=32, chunk_tokens=4,
                                       extend_buckets=(8,), extend_rows=(2,), **settings),
                  devices=devices)
  engine.publish(params, 0)
  async def one(prefix, i):
    context = await engine.open(prefix)
    first = await context.generate(SampleRequest(address_key(0, i), 5))
    forks = await context.fork(2)
    later = await asyncio.gather(
        *(f.generate(SampleRequest(address_key(1, i, k), 6)) for k, f in enumerate(forks)))
    for c in (context, *forks):
      c.close()
    return np.concatenate([s.behaviour_log_probs for s in (first, *later)])
  async def main():
    prefix = await engine.prefill([1, 2, 3])
    return await asyncio.gather(*(one(prefix, i) for i in range(6)))
  values = np.stack(asyncio.run(main()))
  used = {d for lane in engine.scheduler.lanes for d in lane.slots.device.state.logits.devices()}
  engine.close()
  return values, len(used)
"""

_DEVICES = (
  _COMMON
  + """
from jax.sharding import NamedSharding, PartitionSpec
params = models.init(config, jax.random.key(0))
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = jax.tree.map(
    lambda v: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*([None] * (v.ndim - 1)), "x"))),
    params)
one, used_by_one = sampled(params, 1)
two, used_by_two = sampled(sharded, 2)
assert (used_by_one, used_by_two) == (1, 2)
np.testing.assert_array_equal(one, two)
"""
)

_PROCESSES = (
  _COMMON
  + """
from jax.sharding import NamedSharding, PartitionSpec
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
local = jax.device_get(models.init(config, jax.random.key(0)))
def shard(v):
  sharding = NamedSharding(mesh, PartitionSpec(*([None] * (v.ndim - 1)), "x"))
  return jax.make_array_from_callback(v.shape, sharding, lambda index: v[index])
params = jax.tree.map(shard, local)
assert not jax.tree.leaves(params)[0].is_fully_addressable
values, _ = sampled(params, 1)
expected, _ = sampled(jax.device_put(local, jax.local_devices()[0]), 1)
np.testing.assert_array_equal(values, expected)
"""
)

_APART = (
  _COMMON
  + """
from jax.sharding import NamedSharding, PartitionSpec
from agentjax.engine import publish
from agentjax.sharding import MeshConfig
count, index = int(sys.argv[2]), int(sys.argv[3])
if count > 1:
  jax.distributed.initialize(sys.argv[1], count, index)
def through_the_host(*_):
  raise AssertionError("no device that trains has the part that one of a lane needs")
assert callable(jax._src.array.shard_sharded_device_array_slow_path)  # else nothing watches
jax._src.array.shard_sharded_device_array_slow_path = through_the_host
programs, program = [], publish.reshard_program
def noted(targets):
  programs.append(targets)
  return program(targets)
publish.reshard_program = noted
moves, put = [], jax.device_put
def counted(values, *where):
  if isinstance(values, list):
    moves.append(len(values))
  return put(values, *where)
parts = [[d for d in jax.devices() if d.process_index == p] for p in range(count)]
train = [d for part in parts for d in part[:2]]
mesh = jax.make_mesh((len(train),), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=train)
local = jax.device_get(models.init(config, jax.random.key(0)))
def shard(v):
  sharding = NamedSharding(mesh, PartitionSpec(*([None] * (v.ndim - 1)), "x"))
  return jax.make_array_from_callback(v.shape, sharding, lambda index: v[index])
params = jax.tree.map(shard, local)
lane = dict(devices=parts[index][2:], mesh=MeshConfig(fsdp=1, tensor=2))
jax.device_put = counted
values, used = sampled(params, 1, **lane)
jax.device_put = put
assert used == 2 and len(programs) == 1 and programs[0][0].mesh.shape["tensor"] == 2
assert moves.count(len(jax.tree.leaves(local))) == 1, moves
expected, _ = sampled(jax.device_put(local, parts[index][0]), 1, devices=parts[index][:1])
np.testing.assert_allclose(values, expected, atol=1e-5)
"""
)


def _environment(devices: int) -> dict[str, str]:
  return {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(_ROOT),
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
  }


def start(script: str, devices: int, *arguments: str) -> subprocess.Popen:
  """A process that runs a script on so many CPU devices."""
  return subprocess.Popen(
    [sys.executable, "-c", script, *arguments],
    env=_environment(devices),
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process: subprocess.Popen, *, seconds: float = 300.0) -> None:
  """Waits for a process that must end well."""
  try:
    _, errors = process.communicate(timeout=seconds)
  finally:
    process.kill()
  assert process.returncode == 0, errors[-5000:]


def test_lanes_on_two_devices_with_sharded_weights_sample_the_same_bits():
  finish(start(_DEVICES, 2))


@pytest.mark.slow
def test_weights_that_span_processes_are_gathered_on_each():
  address = free_address()
  processes = [start(_PROCESSES, 1, address, str(i)) for i in range(2)]
  for process in processes:
    finish(process)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lanes_on_other_devices_get_all_weights_by_one_program_and_one_transfer(count):
  address = free_address()
  processes = [start(_APART, 4, address, str(count), str(i)) for i in range(count)]
  for process in processes:
    finish(process)
