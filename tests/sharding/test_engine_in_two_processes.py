"""Sampling on lanes of two processes against lanes of one device. As a script: one of the two."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineError
from agentjax.sharding import make_mesh, shardings
from agentjax.sharding.hosts import key_value_store
from tests.engine.conftest import dispatched
from tests.sharding.test_engine_on_eight_devices import MODELS, MeshConfig, one, played, sizes
from tests.training.figures import free_address

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
LANES = {
  "tensor=4": dict(mesh=one(tensor=4)),
  "two lanes": dict(mesh=one(tensor=2), lanes=2),
  "slots in parts": dict(mesh=one(data=2, tensor=2)),
  "experts": dict(mesh=one(expert=2, tensor=2)),
  "stored on the host": dict(mesh=one(tensor=4), device_store_mb=0, cache_tokens=256),
  "int8": dict(mesh=one(tensor=4), cache_dtype="int8", weight_dtype="int8"),
}


def met(name: str) -> None:
  """Both processes are here; they wait on their hosts."""
  key_value_store().wait_at_barrier(name, 300_000)


def follow(config: models.ModelConfig, params: models.Params, name: str, **changes) -> None:
  """The process that repeats what the other decides, until that has ended."""
  engine = Engine(config, sizes(**changes), devices=jax.devices())
  engine.publish(params, 0)
  with pytest.raises(EngineError, match="led by process 0.*sample there"):
    asyncio.run(engine.prefill([1, 2]))
  met(name)
  engine.close()


def lead(config: models.ModelConfig, params: models.Params, name: str, **changes):
  with dispatched(ahead=True):
    found = played(config, params, devices=jax.devices(), **changes)
  met(name)
  return found


def compare(model: str, lanes: list[str], index: int) -> None:
  """Same tokens as on one device, log-probs up to rounding."""
  config = MODELS[model]
  params = jax.jit(lambda key: models.init(config, key))(jax.random.key(0))
  mesh = make_mesh(MeshConfig(data=2, fsdp=2))
  with jax.set_mesh(mesh):
    trained = jax.jit(
      lambda key: models.init(config, key),
      out_shardings=shardings(models.param_specs(config), mesh),
    )(jax.random.key(0))
  for key in lanes:
    changes = {**LANES[key], "processes": 2}
    if index:
      follow(config, trained, key, **changes)
      continue
    alone = {k: v for k, v in LANES[key].items() if k not in ("mesh", "lanes")}
    ids, log_probs, _, _ = played(config, params, devices=jax.local_devices()[:1], **alone)
    found, values, stats, used = lead(config, trained, key, **changes)
    np.testing.assert_array_equal(found, ids, err_msg=key)
    bound = 1e-4 if key == "int8" else 1e-5
    np.testing.assert_allclose(values, log_probs, rtol=bound, atol=bound, err_msg=key)
    assert used == set(jax.devices()) and stats.parked > 0 and stats.ahead_dispatches > 0


@pytest.mark.parametrize(
  ("model", "lanes"),
  [
    ("dense", list(LANES)[:3]),
    ("hybrid", list(LANES)),
    ("youtu", ["tensor=4"]),
    ("gemma4_e2b", ["tensor=4", "stored on the host"]),
  ],
  ids=["dense", "hybrid", "latent attention", "windows"],
)
def test_lanes_of_two_processes_draw_the_tokens_of_one_device(model, lanes):
  common = {"address": free_address(), "model": model, "lanes": lanes}
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
  }
  children = [
    subprocess.Popen(
      [sys.executable, "-m", "tests.sharding.test_engine_in_two_processes", json.dumps(sent)],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for sent in ({**common, "index": index} for index in range(2))
  ]
  try:
    outputs = [child.communicate(timeout=900)[0] for child in children]
  finally:
    for child in children:
      child.kill()
  assert [child.returncode for child in children] == [0, 0], "\n".join(o[-3000:] for o in outputs)


def test_a_lane_of_more_processes_than_there_are_is_refused():
  with pytest.raises(ConfigError, match=r"engine.processes=2; allowed: 1, the number of processes"):
    Engine(MODELS["dense"], sizes(processes=2, mesh=one(tensor=2)), devices=jax.devices()[:1])


def _main(address: str, model: str, lanes: list[str], index: int) -> None:
  jax.distributed.initialize(address, 2, index)
  compare(model, lanes, index)


if __name__ == "__main__":
  _main(**json.loads(sys.argv[1]))
