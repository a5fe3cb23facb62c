"""New weights while programs sample: every token is of the weights that its version names."""

import asyncio
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest, address_key
from agentjax.engine.home import Home
from agentjax.engine.publish import PublishError, find_route
from agentjax.models.lora import LoraConfig, adapt, lora_specs, merge_lora, split_adapters
from tests.models.rows import TINY, draw, filled_adapters
from tests.training.figures import free_address

# Nothing but the last token decides about the next one, so that a context of several versions can
# be checked token by token.
MODEL = models.ModelConfig(vocab_size=32, d_model=16, pattern="-", d_mlp=32)
VERSIONS, EPISODES, TOKENS, PROMPT = 12, 8, 240, [3, 1, 4]


def test_tokens_carry_the_version_that_sampled_them_while_another_thread_publishes():
  published = [models.init(MODEL, jax.random.key(i)) for i in range(VERSIONS)]
  engine = Engine(
    MODEL,
    EngineConfig(
      slots=4, lanes=2, max_length=256, chunk_tokens=8, extend_buckets=(16,), extend_rows=(4,)
    ),
    devices=jax.local_devices()[:1],
  )
  engine.publish(published[0], 0)

  async def episode(prefix, i):
    context = await engine.open(prefix)
    first = await context.generate(SampleRequest(address_key(0, i), TOKENS // 2))
    (fork,) = await context.fork(1)
    second = await fork.generate(SampleRequest(address_key(1, i), TOKENS // 2))
    context.close()
    fork.close()
    return [np.concatenate([getattr(s, n) for s in (first, second)]) for n in FIELDS]

  async def main():
    prefix = await engine.prefill(PROMPT)
    return await asyncio.gather(*(episode(prefix, i) for i in range(EPISODES)))

  samples = []
  thread = threading.Thread(target=lambda: samples.extend(asyncio.run(main())))
  thread.start()
  for version in range(1, VERSIONS):
    before = engine.stats.sampled_tokens
    while thread.is_alive() and engine.stats.sampled_tokens < before + TOKENS * EPISODES // 16:
      time.sleep(0.001)
    engine.publish(published[version], version)
  thread.join()
  engine.close()

  pairs = jnp.stack(jnp.meshgrid(*[jnp.arange(MODEL.vocab_size)] * 2, indexing="ij"), -1)
  pairs = pairs.reshape(-1, 2)
  positions = jnp.broadcast_to(jnp.arange(2), pairs.shape)

  @jax.jit
  def log_probs(params):
    scores = models.score_tokens(params, MODEL, pairs, jnp.ones_like(pairs), positions)
    return scores.log_probs[:, 1].reshape(MODEL.vocab_size, MODEL.vocab_size)

  tables = np.stack([log_probs(params) for params in published])
  assert len(samples) == EPISODES
  mixed = 0
  for token_ids, versions, recorded in samples:
    before = np.concatenate([PROMPT[-1:], token_ids[:-1]])
    np.testing.assert_allclose(recorded, tables[versions, before, token_ids], atol=1e-4)
    assert (np.diff(versions) >= 0).all()
    mixed += len(set(versions.tolist())) > 1
  assert mixed > 0


_LORA = LoraConfig(rank=2, alpha=4.0)
_ADAPTED = dataclasses.replace(TINY, pattern="E*", qk_norm=False)


@pytest.mark.slow
def test_adapters_are_sent_alone_while_their_base_stays():
  base = draw(_ADAPTED, seed=0)
  every = [adapt(base, filled_adapters(_ADAPTED, _LORA, seed), _LORA) for seed in range(2)]
  engine = Engine(
    _ADAPTED,
    EngineConfig(slots=4, max_length=32, chunk_tokens=8, extend_buckets=(8,), extend_rows=(4,)),
    devices=jax.local_devices()[:1],
  )

  def sampled():
    async def main():
      contexts = [await engine.open_ids([1, 2, 3 + i]) for i in range(4)]
      keys = [address_key(0, i) for i in range(4)]
      calls = [c.generate(SampleRequest(k, 20)) for c, k in zip(contexts, keys, strict=True)]
      samples = await asyncio.gather(*calls)
      for context in contexts:
        context.close()
      return samples

    return asyncio.run(main())

  def laid_out():
    (weights,) = engine.scheduler._weights.values()
    plain, adapters = split_adapters(weights.params)
    return jax.tree.leaves(plain), sum(leaf.nbytes for leaf in jax.tree.leaves(adapters))

  engine.publish(every[0], 0)
  sampled()
  first, adapter_bytes = laid_out()
  whole = sum(leaf.nbytes for leaf in first) + adapter_bytes
  assert engine.stats.published_bytes == whole and adapter_bytes < 0.3 * whole
  # The trainer's arrays are others at every step: it donates them.
  engine.publish(jax.tree.map(jnp.copy, every[1]), 1)
  assert engine.stats.published_bytes == whole + adapter_bytes
  kept, _ = laid_out()
  assert all(a is b for a, b in zip(first, kept, strict=True))
  ids = np.asarray([[1, 2, 3 + i, *s.token_ids] for i, s in enumerate(sampled())])
  recorded = np.stack([s.behaviour_log_probs for s in sampled()])
  for params in (every[1], merge_lora(base, filled_adapters(_ADAPTED, _LORA, 1), _LORA)):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    scores = models.score_tokens(params, _ADAPTED, ids, np.ones_like(ids), positions)
    np.testing.assert_allclose(recorded, scores.log_probs[:, 3:], atol=2e-5)
  (lane,) = engine.scheduler.lanes
  specs = models.param_specs(_ADAPTED)
  _, adapters = split_adapters(adapt(specs, lora_specs(specs, _LORA), _LORA))
  _, planned, _ = lane.slots.programs.abstract_arguments(lane.slots.home, adapters)
  params = lane.slots.weights.params
  jax.tree.map(
    lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail(), planned, params
  )
  moved = jax.tree.map(lambda w: w * 1.5, every[1])
  engine.publish(moved, 2)
  assert engine.stats.published_bytes == 2 * whole + adapter_bytes, "another base is sent again"
  with pytest.raises(PublishError, match="other arrays"):
    engine.publish(base, 3)
  engine.close()


FIELDS = ("token_ids", "versions", "behaviour_log_probs")

_ROOT = pathlib.Path(__file__).parents[2]
_CHILD = """
import json, sys
import jax
address, index = json.loads(sys.argv[1])
jax.distributed.initialize(address, 2, index)
import jax.monitoring
import numpy as np
import pytest
from agentjax import models
from agentjax.engine import Engine, EngineConfig, publish
from agentjax.sharding import MeshConfig, make_mesh, shardings
from tests.engine.test_publish import MODEL
compiled, moved = [], []
jax.monitoring.register_event_duration_secs_listener(
  lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else 0
)
reshard = publish._reshard
publish._reshard = lambda leaves, targets: moved.append(len(leaves)) or reshard(leaves, targets)
mesh = make_mesh(MeshConfig(data=1, fsdp=4))
specs = models.param_specs(MODEL)
init = jax.jit(lambda key: models.init(MODEL, key), out_shardings=shardings(specs, mesh))
published = [init(jax.random.key(i)) for i in range(3)]
config = EngineConfig(slots=4, lanes=2, max_length=32, extend_buckets=(16,), extend_rows=(4,))
engine = Engine(MODEL, config)
counts = []
for version, params in enumerate(published):
  before = len(compiled)
  engine.publish(params, version)
  counts.append(len(compiled) - before)
expected = jax.jit(lambda key: models.init(MODEL, key))(jax.random.key(2))
lanes = engine.scheduler._weights
assert [home.devices for home in lanes] == [(device,) for device in jax.local_devices()], lanes
for (device,), weights in ((home.devices, weights) for home, weights in lanes.items()):
  for leaf in jax.tree.leaves(weights.params):
    assert leaf.devices() == {device}
  wanted = engine.scheduler.lanes[0].slots.programs.prepare(jax.device_put(expected, device))
  jax.tree.map(np.testing.assert_array_equal, weights.params, wanted)
print("RESULT", json.dumps([counts, moved]))
"""


@pytest.mark.slow
def test_processes_move_all_arrays_by_one_program_that_is_compiled_once():
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
  }
  address = free_address()
  children = [
    subprocess.Popen(
      [sys.executable, "-c", _CHILD, json.dumps([address, index])],
      cwd=_ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in range(2)
  ]
  outputs = [child.communicate(timeout=300)[0] for child in children]
  for child, output in zip(children, outputs, strict=True):
    assert child.returncode == 0, output[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT")]
    (first, *later), moved = json.loads(line.removeprefix("RESULT"))
    assert first > 0 and later == [0, 0]
    assert len(moved) == 3 and moved[0] > 0, "one program moves all arrays of a publication"


class Described(NamedTuple):
  """A device of some process."""

  process_index: int
  number: int


def test_devices_that_train_are_whole_lanes_where_lanes_span_processes():
  lane = Home(tuple(Described(process, number) for process in range(2) for number in (6, 7)))
  uneven = [Described(process, number) for process in range(4) for number in range(3)]
  with pytest.raises(PublishError, match=r"take 2 devices of each, .* \[3, 3\] in .* \[0, 1\]"):
    find_route([lane], uneven)
  lost = [device for device in uneven if device.process_index != 1]
  with pytest.raises(PublishError, match=r"\[3\] in the processes \[0\]"):
    find_route([lane], lost)
