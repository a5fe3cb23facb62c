"""Layers with a window hold the pages of their window; nobody sees that but the memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest, SlotEngine
from agentjax.models.config import Gemma4Config
from agentjax.planning.compile import LanePlans
from tests.engine.conftest import dispatched, text
from tests.engine.test_scheduler import assert_same_bits, free_slots, request

PAGE = 8
SLOW = pytest.mark.slow
PROMPTS = [
  [(7 * i + i // 9) % 48 for i in range(150)],
  [(7 * i + i // 9) % 48 for i in range(100)] + [(5 * i) % 48 for i in range(41)],
  [(3 * i) % 48 for i in range(37)],
]


def local(window: int, pattern: str = "lg") -> models.ModelConfig:
  """Layers with a window, and others, as in Gemma."""
  return models.ModelConfig(
    vocab_size=48,
    d_model=16,
    pattern=pattern,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=100.0,
    d_mlp=16,
    mlp_activation="geglu",
    tie_embeddings=True,
    gemma=Gemma4Config(
      window=window, global_kv_heads=1, global_head_dim=8, per_layer_width=0, logit_softcap=None
    ),
  )


def two_passes(window: int) -> models.ModelConfig:
  """Each layer keeps all places of its first pass, and a window of its second."""
  plain = dataclasses.replace(
    local(1), pattern="*-", gemma=None, mlp_activation="swiglu", tie_embeddings=False
  )
  return dataclasses.replace(plain, second_pass=models.SecondPassConfig(window=window))


def sizes(**changes) -> EngineConfig:
  return EngineConfig(
    **{
      "slots": 4,
      "max_length": 320,
      "chunk_tokens": 4,
      "extend_buckets": (4, 16),
      "extend_rows": (4, 2),
      "prefill_tokens": 32,
      "block_tokens": PAGE,
      "snapshot_tokens": 48,
      "warmup": False,
      **changes,
    }
  )


@contextlib.contextmanager
def opened(config: models.ModelConfig, *, full: bool = False, **changes) -> Iterator[Engine]:
  """An engine; with ``full``, one whose layers keep all places, whatever they read."""
  with contextlib.ExitStack() as stack:
    if full:
      nothing = mock.Mock(side_effect=lambda state: [None] * len(jax.tree.leaves(state)))
      stack.enter_context(mock.patch.object(models, "cache_windows", nothing))
      changes["max_stop_ids"] = 5  # so that no programs are shared
    engine = Engine(config, sizes(**changes), decode=text, devices=jax.local_devices()[:1])
  engine.publish(models.init(config, jax.random.key(0)), 0)
  yield engine
  engine.close()


def tables(engine: Engine):
  return engine.scheduler.lanes[0].slots.tables


async def busy(engine: Engine, i: int):
  """Long prompts, stop strings, observations, forks that go on, all behind several windows."""
  context = await engine.open_ids(PROMPTS[i % 3], priority=(i % 2,))
  samples = [await context.generate(request(i, tokens=11, stop_strings=("3", "AB")))]
  await context.extend([i, *range(10, 10 + 5 * i)])
  forks = await context.fork(2)
  samples += await asyncio.gather(
    *(fork.generate(request(i, 1 + k, tokens=23 + 9 * k)) for k, fork in enumerate(forks))
  )
  samples.append(await context.generate(request(i, 9, tokens=13, stop_ids=(5, 6))))
  for each in (context, *forks):
    each.close()
  return samples


def play(engine: Engine, *, ahead: bool, calls: int = 4):
  async def main():
    found = await asyncio.gather(*(busy(engine, i) for i in range(calls)))
    return [sample for samples in found for sample in samples]

  with dispatched(ahead=ahead):
    return asyncio.run(asyncio.wait_for(main(), 300))


@pytest.mark.parametrize(
  ("config", "changes"),
  [
    pytest.param(local(3), {}, id="under a page", marks=SLOW),
    pytest.param(local(PAGE), {"prefix_reuse": "none", "cache_tokens": 0}, id="a page"),
    # In one piece for each dispatch.
    pytest.param(local(21), {"max_length": 248}, id="laid out", marks=SLOW),
    pytest.param(local(21, "Llgr"), {"speculate": "ngram"}, id="drafts", marks=SLOW),
    pytest.param(local(21), {"cache_dtype": "int8"}, id="int8", marks=SLOW),
    pytest.param(two_passes(20), {}, id="two passes", marks=SLOW),
  ],
)
def test_tokens_and_log_probs_are_those_of_layers_that_keep_all(config, changes):
  """Mostly with so few pages that contexts are parked far behind their first windows."""
  with opened(config, full=True, **changes) as engine:
    assert len(tables(engine)) == 1
    expected = play(engine, ahead=False)
  with opened(config, **{"cache_tokens": 400, **changes}) as engine:
    whole, windows = tables(engine)
    assert windows.layers.pages < whole.layers.pages
    assert_same_bits(play(engine, ahead=True), expected)
    assert engine.stats.ahead_dispatches > 0
    assert engine.stats.parked > 0
    assert free_slots(engine) == 4
  gc.collect()
  for table in (whole, windows):
    assert [pool.free for pool in table.pools] == [table.layers.pages - 1]


def test_a_slot_holds_the_pages_of_its_window():
  config = local(21)
  engine = SlotEngine(config, sizes())
  engine.publish(models.init(config, jax.random.key(0)), 0)
  whole, windows = engine.tables
  ids = np.asarray(PROMPTS[0], np.int32)
  most = 0
  engine.place(None, [1])
  for cut in range(0, 150, 10):
    engine.extend([(1, ids[cut : cut + 10])])
    held = cut + 10
    assert (whole.first[1], whole.end(1)) == (0, -(-held // PAGE))
    # A token sees itself and the 20 before it.
    assert (windows.first[1], windows.end(1)) == (max(0, held - 20) // PAGE, -(-held // PAGE))
    most = max(most, windows.end(1) - windows.first[1])
  assert most == 4
  free = [table.pools[0].free for table in (whole, windows)]
  snapshot = engine.read(1)  # shares all pages but the last
  assert [len(blocks) for blocks in snapshot.blocks] == [19, 3]
  assert [table.pools[0].free for table in (whole, windows)] == [n - 1 for n in free]
  engine.place(snapshot, [0, 2])
  plan = engine.idle_plan()
  for step in range(12):
    plan.budget[:3], plan.filters.temperature[:3] = 4, 1.0
    plan.key_data[:3], plan.token_index[:] = (5, 6), 4 * step
    chunk = engine.decode(plan)
    for slot in (1, 2):
      np.testing.assert_array_equal(chunk.token_ids[slot], chunk.token_ids[0])
      np.testing.assert_array_equal(chunk.behaviour_log_probs[slot], chunk.behaviour_log_probs[0])
  assert engine.lengths[0] == 198
  assert [table.end(0) - table.first[0] for table in (whole, windows)] == [25, 3]
  # Nobody shares a page of a window any more; the snapshot keeps its own.
  assert not any(windows.shared[slot] for slot in (0, 1, 2))
  del snapshot
  for slot in (0, 1, 2):
    engine.release(slot)
  for table in (whole, windows):
    assert table.pools[0].free == table.layers.pages - 1


def test_a_known_beginning_keeps_the_window_that_its_end_needs():
  def played(engine: Engine):
    async def main():
      first = await engine.open_ids(PROMPTS[0])
      samples = [await first.generate(request(0, tokens=9))]
      for i in (0, 1):
        context = await engine.open_ids(PROMPTS[i])
        samples.append(await context.generate(request(i, tokens=9)))
        context.close()
      first.close()
      return samples

    return asyncio.run(main())

  config = local(21)
  with opened(config, full=True, prefix_reuse="none") as engine:
    expected = played(engine)
  with opened(config) as engine:
    assert_same_bits(played(engine), expected)
    # Kept after 48, 96 and 144 tokens; the second prompt shares 100 with the first.
    assert engine.stats.reused_tokens == 144 + 96
    slots = engine.scheduler.lanes[0].slots
    _, entry = engine.scheduler.known[0].find(np.asarray(PROMPTS[0]))
    assert len(entry.snapshot.blocks[1]) == 3
    cuts = [tokens for tokens in range(1, 144) if slots.may_cut(entry.snapshot, tokens)]
    # Its pages begin with token 120.
    assert cuts == list(range(140, 144))
  with opened(config, prefix_reuse="turns") as engine:
    found = played(engine)
    assert engine.stats.reused_tokens > 200
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.behaviour_log_probs, b.behaviour_log_probs, atol=1e-5)


def test_where_all_layers_have_a_window_a_context_may_be_longer_than_all_pages():
  with opened(local(21, "ll"), cache_tokens=160) as engine:
    (table,) = tables(engine)
    assert (table.layers.pages - 2) * PAGE <= 160 and engine.scheduler.max_tokens == 320

    async def main():
      contexts = [await engine.open_ids(PROMPTS[0]) for _ in range(6)]
      calls = (c.generate(request(i, tokens=160)) for i, c in enumerate(contexts))
      return await asyncio.wait_for(asyncio.gather(*calls), 300)

    found = asyncio.run(main())
  with opened(local(21, "ll"), full=True, prefix_reuse="none") as engine:
    assert_same_bits(found, asyncio.run(main()))


def test_64_long_contexts_take_the_memory_of_their_windows():
  """As many layers with a window as without: hardly more than half of what all would take."""
  config, length = local(32), 512

  def run(which: range, *, full: bool = False):
    settings = {
      "slots": 64,
      "chunk_tokens": 8,
      "extend_buckets": (256,),
      "extend_rows": (8,),
      "prefill_tokens": 8192,
      "block_tokens": 16,
      "max_length": length,
    }

    async def one(engine, i: int):
      context = await engine.open_ids((np.arange(length - 8) * (i + 3) + i) % 48)
      sample = await context.generate(SampleRequest((i, 1), 8))
      context.close()
      return sample

    async def main(engine):
      return await asyncio.gather(*(one(engine, i) for i in which))

    with opened(config, full=full, **settings) as engine:
      found = asyncio.run(main(engine))
      cache = engine.scheduler.lanes[0].slots.device.state.cache.blocks
      return found, engine.stats.parked, [sum(v.nbytes for v in jax.tree.leaves(b)) for b in cache]

  found, parked, (windows, whole) = run(range(64))
  token = 2 * 8 * 4  # a key and a value
  assert parked == 0 and whole >= 64 * length * token
  # For each slot a window and two chunks, and another window; eight rows that take in 256 tokens.
  assert windows == (64 * (4 + 3) + 8 * 16 + 2) * 16 * token < 0.29 * whole
  alone, _, _ = run(range(5, 7), full=True)
  assert_same_bits(found[5:7], alone)


def test_the_plan_tells_what_windows_take_and_what_one_more_token_does():
  config = local(21, "llg")
  with opened(config, cache_tokens=4000) as engine:
    slots = engine.scheduler.lanes[0].slots
    blocks = slots.device.state.cache.blocks
    lane = LanePlans(slots.model_config, slots.config, slots.home, capacity=0)
    memory = lane.memory()
  near = sum(v.nbytes for block in blocks[:2] for v in jax.tree.leaves(block))
  assert memory.windows == near < 0.2 * sum(v.nbytes for v in jax.tree.leaves(blocks[2]))
  assert memory.token == 2 * 8 * 4  # a key and a value of the last layer
  assert memory.tokens >= 4000
  # Where it has fewer pages than the windows of all slots need, more tokens add to these as well.
  with opened(config, cache_tokens=64) as engine:
    slots = engine.scheduler.lanes[0].slots
    memory = LanePlans(slots.model_config, slots.config, slots.home, capacity=0).memory()
  assert (memory.windows, memory.token) == (0, 3 * 2 * 8 * 4)
