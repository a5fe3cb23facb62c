"""Adapters over eight devices against one, in training and in sampling. As a script: both."""

from __future__ import annotations

import asyncio
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models, sharding
from agentjax.engine import Engine, SampleRequest, address_key
from agentjax.models.lora import LoraConfig, adapt, lora_specs, merge_lora, split_adapters
from tests.models.rows import draw, filled_adapters
from tests.sharding.test_engine_on_eight_devices import MODELS, one, played, sizes

_LORA = LoraConfig(rank=2, alpha=4.0).freeze()
_MODEL = dataclasses.replace(MODELS["hybrid"], num_experts=4, d_expert=16, vocab_size=32)


def check_gradients() -> None:
  """On meshes that split experts, heads, rows and time, those of the sum on one device."""
  specs = models.param_specs(_MODEL)
  params, adapters = draw(_MODEL, seed=0), filled_adapters(_MODEL, _LORA)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, _MODEL.vocab_size, (8, 16)).astype(np.int32)
  rows = ids, np.ones_like(ids), np.broadcast_to(np.arange(16, dtype=np.int32), ids.shape)

  def loss(adapters, params, rows, join):
    scores = models.score_tokens(join(params, adapters, _LORA), _MODEL, *rows)
    return jnp.sum(jnp.cos(jnp.arange(128.0)).reshape(8, 16) * scores.log_probs)

  step = jax.jit(jax.grad(loss), static_argnums=3)
  wanted = step(adapters, params, rows, merge_lora)
  for axes in ({"expert": 2, "tensor": 2, "fsdp": 2}, {"fsdp": 2, "context": 2, "data": 2}):
    mesh = sharding.make_mesh(sharding.MeshConfig(**axes))
    split = jax.device_put(adapters, sharding.shardings(lora_specs(specs, _LORA), mesh))
    placed = jax.device_put(params, sharding.shardings(specs, mesh))
    with jax.set_mesh(mesh):
      found = step(split, placed, jax.device_put(rows, sharding.batch_sharding(mesh)), adapt)
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(ours, expected, atol=2e-4 * (1 + np.abs(expected).max()))


def check_lanes() -> None:
  """Lanes of several devices sample what one device samples, and get adapters alone."""
  config = MODELS["hybrid"]  # what does not divide is filled up
  params, adapters = draw(config, seed=0), filled_adapters(config, _LORA)
  ids, log_probs, *_ = played(config, adapt(params, adapters, _LORA))
  merged_ids, merged, *_ = played(config, merge_lora(params, adapters, _LORA))
  np.testing.assert_array_equal(ids, merged_ids)
  np.testing.assert_allclose(log_probs, merged, atol=1e-5)
  for changes in (dict(mesh=one(expert=2, tensor=2), lanes=2), dict(mesh=one(tensor=4))):
    found, values, *_ = played(config, adapt(params, adapters, _LORA), **changes)
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_allclose(values, log_probs, rtol=1e-5, atol=1e-5)

  engine = Engine(config, sizes(mesh=one(tensor=2), lanes=2, warmup=False))
  engine.publish(adapt(params, adapters, _LORA), 0)
  whole = engine.stats.published_bytes
  changed = jax.tree.map(lambda w: w + 0.1, adapters)
  engine.publish(adapt(params, changed, _LORA), 1)
  assert engine.stats.published_bytes - whole < 0.4 * whole
  for weights in engine.scheduler._weights.values():
    _, laid = split_adapters(weights.params)
    query = changed.groups[0][1].mixer.query
    np.testing.assert_array_equal(laid.blocks[1].mixer.query.b, query.b[0])
  engine.close()


def check_policies() -> None:
  """Two policies on lanes of several devices, each with its own adapters over one base."""
  config = MODELS["hybrid"]
  params = draw(config, seed=0)

  def sampled(**changes):
    engine = Engine(config, sizes(warmup=False, **changes), policies=2)
    for i, each in enumerate((engine, *engine.others)):
      each.publish(adapt(params, filled_adapters(config, _LORA, seed=i), _LORA), i)

    async def episode(each, i):
      context = await each.open_ids([1, 2, 3 + i])
      return await context.generate(SampleRequest(address_key(0, i), 9))

    async def main():
      both = (engine, *engine.others)
      return await asyncio.gather(*(episode(each, i) for i in range(4) for each in both))

    samples = asyncio.run(main())
    traces = dict(engine.scheduler.lanes[0].slots.programs.traces)
    assert traces["decode"] <= 2, traces  # of each lane's devices
    engine.close()
    return [
      np.concatenate([getattr(s, name) for s in samples])
      for name in ("token_ids", "behaviour_log_probs", "versions")
    ]

  ids, log_probs, versions = sampled()
  for changes in (dict(mesh=one(tensor=2, data=2), lanes=2), dict(lanes=2)):
    found = sampled(**changes)
    np.testing.assert_array_equal(found[0], ids)
    np.testing.assert_allclose(found[1], log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[2], versions)


_CHECKS = {"gradients": check_gradients, "lanes": check_lanes, "policies": check_policies}


@pytest.mark.slow
@pytest.mark.parametrize("name", _CHECKS)
def test_adapters_on_eight_devices_are_those_of_one(name, on_eight_devices):
  assert on_eight_devices(__file__, name).split() == [name, "agree"]


if __name__ == "__main__":
  assert jax.device_count() == 8
  _CHECKS[sys.argv[1]]()
  print(f"{sys.argv[1]} agree")
