"""Several policies with adapters in one engine: each as in one of its own, over one base."""

import asyncio
import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineConfig, SampleRequest, address_key
from agentjax.engine.publish import PublishError
from agentjax.engine.request import EngineError
from agentjax.models.lora import LoraConfig, Shared, adapt
from agentjax.sharding import MeshConfig
from tests.models.rows import TINY, draw, filled_adapters

_LORA = LoraConfig(rank=2, alpha=4.0)
_MODEL = dataclasses.replace(TINY, pattern="E*", qk_norm=False)
_BASE = draw(_MODEL, seed=0)
_PROMPT = [5, 1, 7, 2, 9, 4, 3, 8, 6]


def _policy(seed):
  return adapt(_BASE, filled_adapters(_MODEL, _LORA, seed), _LORA)


def _engine(policies, **changes):
  settings = {
    "slots": 4,
    "max_length": 40,
    "chunk_tokens": 4,
    "extend_buckets": (4, 8),
    "extend_rows": (4, 2),
    "block_tokens": 8,
    **changes,
  }
  return Engine(
    _MODEL, EngineConfig(**settings), devices=jax.local_devices()[:1], policies=policies
  )


def _play(engines, order=1):
  """Ids and log-probs of episodes of each engine, interleaved: they fork, park and read."""

  async def episode(engine, i):
    context = await engine.open_ids([*_PROMPT, i])
    first = await context.generate(SampleRequest(address_key(0, i), 5))
    (fork,) = await context.fork(1)
    await fork.extend([1 + i, 2, 3])
    second = await fork.generate(SampleRequest(address_key(1, i), 6))
    context.close()
    fork.close()
    return first, second

  async def main():
    calls = [(engine, i) for i in range(4) for engine in engines][::order]
    return (await asyncio.gather(*(episode(*call) for call in calls)))[::order]

  played = [sample for pair in asyncio.run(main()) for sample in pair]
  return [
    np.concatenate([getattr(sample, name) for sample in played])
    for name in ("token_ids", "behaviour_log_probs", "versions")
  ]


def test_two_adapters_in_one_engine_sample_what_two_engines_sample():
  shared = _engine(2)
  (other,) = shared.others
  engines = shared, other
  for number, engine in enumerate(engines):
    engine.publish(_policy(number), 3 + number)
  ids, log_probs, versions = _play(engines)
  assert shared.stats is other.stats and shared.stats.parked > 0
  assert set(versions) == {3, 4}
  # Another order of work, in which other neighbours stand beside each context: the same bits.
  for found, wanted in zip(_play(engines, order=-1), (ids, log_probs, versions), strict=True):
    np.testing.assert_array_equal(found, wanted)

  weights = next(iter(shared.scheduler._weights.values())).params
  assert isinstance(weights, Shared)
  sizes = [sum(w.nbytes for w in jax.tree.leaves(v)) for v in (weights.base, *weights.adapters)]
  assert shared.stats.published_bytes == sum(sizes), "the base is sent once"

  alone = [_engine(1), _engine(1)]
  for number, engine in enumerate(alone):
    engine.publish(_policy(number), 3 + number)
  wanted = _play(alone)
  np.testing.assert_array_equal(ids, wanted[0])
  np.testing.assert_allclose(log_probs, wanted[1], atol=1e-5)
  swapped = _play(alone[::-1])
  assert np.abs(swapped[1] - wanted[1]).max() > 0.1, "the adapters must matter"

  before = shared.stats.published_bytes
  other.publish(_policy(7), 9)
  assert shared.stats.published_bytes - before == sizes[2]
  assert (shared.version, other.version) == (3, 9)
  for engine in (shared, *alone):
    engine.close()


def test_released_weights_are_gone_and_one_policy_brings_them_back_for_both():
  shared = _engine(2)
  (other,) = shared.others
  for number, engine in enumerate((shared, other)):
    engine.publish(_policy(number), 3)
  expected, whole = _play((shared, other)), shared.stats.published_bytes
  (weights,) = shared.scheduler._weights.values()
  held = [weakref.ref(w) for w in jax.tree.leaves(weights.params.base)]
  publications, own = weights.publications, sum(w.nbytes for w in jax.tree.leaves(weights.params))
  del weights
  asyncio.run(shared.release_weights())
  gc.collect()
  assert not any(ref() is not None for ref in held)
  other.publish(_policy(1), 4)
  assert whole < shared.stats.published_bytes < whole + own
  (weights,) = shared.scheduler._weights.values()
  assert weights.publications == (publications[0], publications[1] + 1)  # prompts stay known
  for found, wanted in zip(_play((shared, other))[:2], expected[:2], strict=True):
    np.testing.assert_array_equal(found, wanted)
  shared.close()


def test_what_is_known_of_a_prompt_is_of_one_policy():
  shared = _engine(2, snapshot_tokens=8)
  (other,) = shared.others

  async def open_and_sample(engine):
    context = await engine.open_ids(_PROMPT)
    sample = await context.generate(SampleRequest(address_key(0), 3))
    context.close()
    return sample.behaviour_log_probs

  async def main():
    shared.publish(_policy(0), 1)
    with pytest.raises(EngineError, match="no weights"):
      await open_and_sample(other)
    other.publish(_policy(1), 1)
    reused, found = [], []
    for engine in (shared, other, shared, other):
      before = shared.stats.reused_tokens
      found.append(await open_and_sample(engine))
      reused.append(shared.stats.reused_tokens - before)
    assert reused[:2] == [0, 0] and min(reused[2:]) > 0
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    assert np.abs(found[0] - found[1]).max() > 1e-3
    # New weights of one policy leave the other's prefixes.
    other.publish(_policy(2), 2)
    before = shared.stats.reused_tokens
    await open_and_sample(other)
    assert shared.stats.reused_tokens == before
    await open_and_sample(shared)
    assert shared.stats.reused_tokens > before
    prefix = await shared.prefill(_PROMPT)
    with pytest.raises(EngineError, match="another policy"):
      await other.open(prefix)

  asyncio.run(main())
  shared.close()


def test_weights_without_adapters_and_experts_on_other_devices_are_refused():
  engine = _engine(2, warmup=False)
  with pytest.raises(PublishError, match="no adapters"):
    engine.publish(_BASE, 3)
  assert engine.version == -1
  engine.close()
  with pytest.raises(ConfigError, match=r"engine\.mesh\.expert=2.*2 policies"):
    _engine(2, mesh=MeshConfig(fsdp=1, expert=2))
