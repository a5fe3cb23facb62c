"""Sampling on lanes of several devices against lanes of one. As a script: the comparisons."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineConfig, SampleRequest, address_key
from agentjax.engine.publish import PublishError
from agentjax.models import cache
from agentjax.sharding import MeshConfig, make_mesh, shardings
from tests.engine.conftest import dispatched
from tests.sharding.test_families_on_eight_devices import FAMILIES

_HYBRID = models.ModelConfig(
  vocab_size=48,
  d_model=16,
  pattern="M*E-",
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
  d_mlp=24,
  mamba_heads=8,
  mamba_head_dim=8,
  mamba_groups=2,
  mamba_state=8,
  num_experts=6,
  experts_per_token=2,
  d_expert=20,
  latent_size=12,
)
MODELS = {
  "dense": dataclasses.replace(_HYBRID, pattern="*-*-", num_heads=4, vocab_size=50),
  "hybrid": _HYBRID,
  **FAMILIES,
}


def one(**axes: int) -> MeshConfig:
  """A mesh of a lane."""
  return MeshConfig(**{"fsdp": 1, **axes})


MESHES = {
  "tensor=2": dict(mesh=one(tensor=2)),
  "tensor=4": dict(mesh=one(tensor=4)),
  "tensor=8": dict(mesh=one(tensor=8)),
  "expert=2": dict(mesh=one(expert=2)),
  "expert=4": dict(mesh=one(expert=4)),
  "lanes=2": dict(mesh=one(tensor=4), lanes=2),
  "mixed": dict(mesh=one(data=2, expert=2), lanes=2),
  "all": dict(mesh=one(data=2, expert=2, tensor=2)),
}


def sizes(**changes) -> EngineConfig:
  return EngineConfig(
    **{
      "slots": 8,
      "max_length": 64,
      "chunk_tokens": 4,
      "extend_buckets": (8, 16),
      "extend_rows": (4, 1),
      "block_tokens": 8,
      **changes,
    }
  )


def played(
  config: models.ModelConfig, params: models.Params, order: int = 1, devices=None, **changes
):
  """Ids and log-probs of episodes that fork, park and read, the engine's stats and devices."""
  engine = Engine(config, sizes(**changes), devices=devices)
  engine.publish(params, 0)

  async def episode(prefix, i):
    context = await engine.open(prefix)
    first = await context.generate(SampleRequest(address_key(0, i), 5))
    forks = await context.fork(2)

    async def on(k):
      await asyncio.sleep(0.01 * ((i + k) % 3))
      await forks[k].extend([1 + i % 4, 2, 3])
      return await forks[k].generate(SampleRequest(address_key(1, i, k), 7))

    later = await asyncio.gather(*(on(k) for k in range(2)))
    for each in (context, *forks):
      each.close()
    return first, *later

  async def main():
    prefix = await engine.prefill([1 + i % (config.vocab_size - 1) for i in range(20)])
    done = await asyncio.gather(*(episode(prefix, i) for i in range(12)[::order]))
    return done[::order]

  samples = [sample for each in asyncio.run(main()) for sample in each]
  used = {d for lane in engine.scheduler.lanes for d in lane.slots.home.devices}
  engine.close()
  ids = np.concatenate([s.token_ids for s in samples])
  return ids, np.concatenate([s.behaviour_log_probs for s in samples]), engine.stats, used


def compare(name: str, meshes: list[str]) -> None:
  """Same tokens, log-probs up to rounding; on one mesh the same bits in another order, ahead."""
  config = MODELS[name]
  params = jax.jit(lambda key: models.init(config, key))(jax.random.key(0))
  ids, log_probs, stats, _ = played(config, params)
  assert stats.parked > 0
  for key in meshes:
    changes = MESHES[key]
    found, values, _, used = played(config, params, **changes)
    np.testing.assert_array_equal(found, ids, err_msg=key)
    np.testing.assert_allclose(values, log_probs, rtol=1e-5, atol=1e-5, err_msg=key)
    sizes_ = {axis: n for axis, n in changes["mesh"].to_dict().items() if n > 1}
    assert len(used) == np.prod(list(sizes_.values())) * changes.get("lanes", 1)
  with dispatched(ahead=True):
    again, values_again, stats, _ = played(config, params, order=-1, **changes)
  assert stats.ahead_dispatches > 0
  np.testing.assert_array_equal(again, ids)
  np.testing.assert_array_equal(values_again, values)


def check_weights_are_moved_shard_to_shard() -> None:
  """From any training layout to lanes on the same and on other devices, to the bit."""
  config = dataclasses.replace(_HYBRID, num_experts=8, d_expert=16, vocab_size=64, latent_size=8)
  params = jax.jit(lambda key: models.init(config, key))(jax.random.key(0))
  wanted = None
  for training, devices in (
    (MeshConfig(fsdp=8), jax.devices()),
    (MeshConfig(fsdp=4, tensor=2), jax.devices()),
    (MeshConfig(fsdp=4, tensor=2), [jax.devices()[i] for i in (0, 2, 4, 6, 7, 5, 3, 1)]),
    (MeshConfig(fsdp=4), jax.devices()[:4]),
    (MeshConfig(fsdp=1), jax.devices()[:1]),
  ):
    mesh = make_mesh(training, devices)
    placed = shardings(models.param_specs(config), mesh)
    for changes in (dict(mesh=one(tensor=4), lanes=2), dict(mesh=one(tensor=2, expert=2)), {}):
      sampling = jax.devices() if changes.get("lanes") else jax.devices()[4:]
      engine = Engine(config, sizes(warmup=False, **changes), devices=sampling)
      laid = jax.tree.map(jnp.copy, jax.device_put(params, placed))
      engine.publish(laid, 3)
      jax.tree.map(lambda leaf: leaf.delete(), laid)  # as the trainer does, which donates its own
      for home, weights in engine.scheduler._weights.items():
        leaves = jax.tree.leaves(weights.params)
        assert {d for leaf in leaves for d in leaf.devices()} == set(home.devices)
        wanted = wanted or [np.asarray(leaf) for leaf in leaves]
        for leaf, value in zip(leaves, wanted, strict=True):
          np.testing.assert_array_equal(leaf, value)
        share = sum(max(s.data.nbytes for s in leaf.addressable_shards) for leaf in leaves)
        whole = sum(leaf.nbytes for leaf in leaves)
        if len(home.devices) > 1:
          assert share < 0.6 * whole, (share, whole)
      assert engine.stats.published_bytes > 0 and engine.stats.publish_seconds > 0
      engine.close()


def check_a_fault_on_the_way_is_told() -> None:
  config = MODELS["dense"]
  params = models.init(config, jax.random.key(0))
  engine = Engine(config, sizes(mesh=one(tensor=2), warmup=False))
  publisher = engine.scheduler._publisher
  move = publisher._move

  def flipped(leaves, specs):
    copies = move(leaves, specs)
    return {home: [copy[0].at[0].add(1e-6), *copy[1:]] for home, copy in copies.items()}

  publisher._move = flipped
  with pytest.raises(PublishError, match="fingerprint"):
    engine.publish(params, 0)
  assert engine.version == -1
  engine.close()


def check_publishing_compiles_once_and_hurts_nobody() -> None:
  """While programs sample: tokens carry the version that drew them, and nothing is compiled."""
  config = MODELS["dense"]
  every = [models.init(config, jax.random.key(i)) for i in range(4)]
  engine = Engine(config, sizes(mesh=one(tensor=4), lanes=2))
  engine.publish(every[0], 0)
  engine.publish(every[1], 1)
  compiled: list[str] = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if "backend_compile_duration" in name else None
  )

  async def main():
    async def episode(i):
      context = await engine.open_ids([1, 2, 3 + i])
      return await context.generate(SampleRequest(address_key(0, i), 50))

    tasks = [asyncio.create_task(episode(i)) for i in range(8)]
    for version in (2, 3):
      await asyncio.sleep(0.1)
      await asyncio.to_thread(engine.publish, every[version], version)
    return await asyncio.gather(*tasks)

  samples = asyncio.run(main())
  engine.close()
  assert not compiled, compiled
  assert {v for s in samples for v in s.versions.tolist()} <= {1, 2, 3}


def check_narrow_keys_are_the_same_on_every_mesh() -> None:
  """In 8 bits, with their scales: forks, parking, pages of several parts."""
  config = MODELS["dense"]
  params = jax.jit(lambda key: models.init(config, key))(jax.random.key(0))
  for dtype in ("int8", "fp8"):
    ids, log_probs, stats, _ = played(config, params, cache_dtype=dtype)
    assert stats.parked > 0
    for key in ("tensor=4", "all"):
      found, values, *_ = played(config, params, cache_dtype=dtype, **MESHES[key])
      np.testing.assert_array_equal(found, ids, err_msg=key)
      np.testing.assert_allclose(values, log_probs, atol=1e-5, err_msg=key)


def check_narrow_weights_are_the_same_on_every_mesh() -> None:
  """With their scales, in experts that are split and filled up too."""
  config = MODELS["hybrid"]
  params = jax.jit(lambda key: models.init(config, key))(jax.random.key(0))
  ids, log_probs, *_ = played(config, params, weight_dtype="int8")
  for key in ("tensor=4", "expert=4", "all"):
    found, values, *_ = played(config, params, weight_dtype="int8", **MESHES[key])
    np.testing.assert_array_equal(found, ids, err_msg=key)
    np.testing.assert_allclose(values, log_probs, atol=1e-5, err_msg=key)


def check_units_filled_up_as_for_a_tpu_change_nothing() -> None:
  """8 bits too: 20 hidden units are 2 x 16, or 4 x 16, of which one device has none of the own."""
  config = MODELS["hybrid"]
  params = jax.jit(lambda key: models.init(config, key))(jax.random.key(0))
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(cache._WIDTHS, "cpu", 16)
    for dtype, key, width in ((None, "tensor=2", 32), ("int8", "tensor=4", 64)):
      axes = MESHES[key]["mesh"]
      specs = models.decode_specs(config, mesh=make_mesh(axes, jax.devices()[: axes.size]))
      assert specs.blocks[2].mixer.expert_up.shape[-1] == width
      ids, log_probs, *_ = played(config, params, weight_dtype=dtype)
      found, values, *_ = played(config, params, weight_dtype=dtype, **MESHES[key])
      np.testing.assert_array_equal(found, ids, err_msg=key)
      np.testing.assert_allclose(values, log_probs, atol=1e-5, err_msg=key)


_CHECKS = (
  check_units_filled_up_as_for_a_tpu_change_nothing,
  check_narrow_weights_are_the_same_on_every_mesh,
  check_narrow_keys_are_the_same_on_every_mesh,
  check_weights_are_moved_shard_to_shard,
  check_a_fault_on_the_way_is_told,
  check_publishing_compiles_once_and_hurts_nobody,
)


def test_a_hybrid_samples_the_same_on_lanes_of_four_devices(on_eight_devices):
  on_eight_devices(__file__, "hybrid", json.dumps(["lanes=2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_samples_the_same_on_every_mesh(on_eight_devices, name):
  on_eight_devices(__file__, name, json.dumps(list(MESHES)))


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in _CHECKS])
def test_on_meshes(on_eight_devices, check):
  on_eight_devices(__file__, check)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(mesh=one(tensor=2)), r"engine.mesh.*tensor=2.*engine.lanes=1"),
    (dict(mesh=MeshConfig(fsdp=2)), r"engine.mesh.fsdp"),
    (dict(mesh=MeshConfig()), r"engine.mesh.fsdp"),
    (dict(mesh=one(context=2)), r"engine.mesh.context"),
    (dict(mesh=one(data=3)), r"engine.slots.*multiple of"),
  ],
)
def test_a_mesh_that_cannot_be_is_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    Engine(MODELS["dense"], sizes(**changes), devices=jax.devices()[:1])


if __name__ == "__main__":
  assert jax.device_count() == 8
  start = time.time()
  if len(sys.argv) > 2:
    compare(sys.argv[1], json.loads(sys.argv[2]))
  else:
    {check.__name__: check for check in _CHECKS}[sys.argv[1]]()
  print("all checks passed", round(time.time() - start), "s")
