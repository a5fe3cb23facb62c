"""Memory follows the tokens that are held, and what is scarce changes no bit and stops nobody."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import (
  ContextLengthError,
  Engine,
  EngineConfig,
  Finish,
  SampleRequest,
  SlotEngine,
)
from tests.engine.conftest import text
from tests.engine.test_scheduler import (
  PROMPTS,
  assert_same_bits,
  episode,
  free_slots,
  request,
  run_episodes,
)


def state_bytes(engine: SlotEngine) -> int:
  return sum(v.nbytes for v in jax.tree.leaves(engine.device.state))


def test_64_contexts_of_1k_tokens_fit_in_room_for_64k_with_slots_of_32k():
  config = models.ModelConfig(
    vocab_size=32, d_model=8, pattern="*", num_heads=1, num_kv_heads=1, head_dim=8
  )
  params = models.init(config, jax.random.key(0))

  def play(which: range, **changes):
    engine = Engine(
      config,
      EngineConfig(
        slots=64,
        chunk_tokens=8,
        extend_buckets=(256,),
        extend_rows=(8,),
        prefill_tokens=8192,
        warmup=False,
        **changes,
      ),
    )
    engine.publish(params, 0)

    async def one(i: int):
      context = await engine.open_ids((np.arange(1016) * (i + 3) + i) % 32)
      return await context.generate(SampleRequest((i, 1), 8))

    async def main():
      return await asyncio.gather(*map(one, which))

    found, slots = asyncio.run(main()), engine.scheduler.lanes[0].slots
    parked, held = engine.stats.parked, slots.pools[0].available
    engine.close()
    return found, state_bytes(slots), parked, held

  found, nbytes, parked, left = play(range(64), max_length=32_768, cache_tokens=65_536)
  token = 2 * 8 * 4  # a key and a value
  assert parked == 0 and left == 1  # the one that copies are made in
  assert nbytes < 66_000 * token < 0.04 * 64 * 32_768 * token
  alone, _, _, _ = play(range(5, 7), max_length=2048)
  assert_same_bits(found[5:7], alone)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"prefix_reuse": "none", "slots": 8, "lanes": 2, "cache_tokens": 128},
    {"speculate": "ngram"},
    {"host_store_mb": 0, "device_store_mb": 0},
  ],
  ids=str,
)
def test_where_everything_contends_for_room_everyone_comes_through(make_engine, changes):
  """Pages for one context of full length, and ten that grow, fork, stop in a string and close."""
  tight = make_engine(**{"cache_tokens": 64, **changes})
  plain = make_engine(**{**changes, "cache_tokens": 0, "host_store_mb": 64})

  async def forking(engine, i: int):
    context = await engine.open_ids(PROMPTS[i % len(PROMPTS)], priority=(i % 3,))
    samples = [await context.generate(request(i, tokens=7, stop_strings=("~~", "ab")))]
    forks = await context.fork(3)
    samples += await asyncio.gather(*(f.generate(request(i, 1, tokens=19)) for f in forks[:2]))
    forks[2].close()
    await context.extend([1, 2, 3])
    samples.append(await context.generate(request(i, 2, tokens=14)))
    for each in (context, *forks):
      each.close()
    return samples

  async def main(engine, order):
    calls = [forking(engine, i) if i % 2 else episode(engine, i) for i in order]
    return await asyncio.wait_for(asyncio.gather(*calls), 300)

  found = asyncio.run(main(tight, range(10)))
  assert tight.stats.parked > 10
  expected = asyncio.run(main(plain, range(10)))
  for a, b in zip(found, expected, strict=True):
    assert_same_bits(list(a), list(b))
  assert free_slots(tight) == tight.config.slots


def test_contexts_longer_than_a_read_share_pages_and_park(model_config, params):
  """Slots of 320 tokens: attention reads pages step by step, where shorter ones are laid out."""

  def play(cache_tokens: int):
    config = EngineConfig(
      slots=4, max_length=320, chunk_tokens=8, extend_buckets=(16, 64), extend_rows=(4, 2),
      block_tokens=16, cache_tokens=cache_tokens, warmup=False,
    )  # fmt: skip
    engine = Engine(model_config, config, devices=jax.local_devices()[:1])
    engine.publish(params, 0)

    async def group(i: int):
      prefix = await engine.prefill((np.arange(250 + 9 * i) * 7 + i) % 48)
      contexts = [await engine.open(prefix) for _ in range(3)]
      calls = (c.generate(request(i, k, tokens=12)) for k, c in enumerate(contexts))
      return await asyncio.gather(*calls)

    async def main():
      return await asyncio.gather(*(group(i) for i in range(3)))

    found, stats = asyncio.run(main()), dataclasses.replace(engine.stats)
    engine.close()
    return sum(found, []), stats

  found, stats = play(400)
  expected, _ = play(0)
  assert stats.parked > 0
  assert_same_bits(found, expected)


def test_what_can_never_fit_is_refused_by_the_name_of_the_setting(make_engine):
  engine = make_engine(cache_tokens=40)

  async def main():
    with pytest.raises(ContextLengthError, match=r"40 tokens in all.*engine\.cache_tokens=40"):
      await engine.open_ids([1] * 41)
    context = await engine.open_ids([1] * 33)
    sample = await context.generate(request())
    assert (len(sample.token_ids), sample.finish, context.room) == (7, Finish.CONTEXT_FULL, 0)
    (fork,) = await context.fork(1)  # in the pages that are spare
    context.close()
    return await fork.generate(request())

  assert asyncio.run(main()).finish == Finish.CONTEXT_FULL


def test_a_group_holds_its_prompt_once(make_engine):
  engine = make_engine(cache_tokens=80)

  async def main():
    prefix = await engine.prefill([1 + i % 40 for i in range(40)])  # five pages of ten
    contexts = [await engine.open(prefix) for _ in range(4)]
    await asyncio.gather(*(c.generate(request(i, tokens=8)) for i, c in enumerate(contexts)))

  asyncio.run(main())
  assert engine.stats.parked == 0 and engine.stats.sampled_tokens == 32


@pytest.mark.parametrize("act", ["call", "fork"])
def test_what_follows_a_stop_string_takes_the_pages_of_idle_contexts(make_engine, act):
  """The context ends at the border of a page, with tokens to draw again, and only the page for a
  copy is left."""
  engine = make_engine(slots=2, cache_tokens=16, block_tokens=8, prefix_reuse="none")

  async def main():
    first = await engine.open_ids(range(1, 9))
    drawn = (await first.generate(request(1, tokens=6))).token_ids.tolist()
    first.close()
    stopped = await engine.open_ids(range(1, 9))
    found = await stopped.generate(request(1, tokens=6, stop_strings=(text(drawn[:2]),)))
    assert found.finish == Finish.STOP_STRING
    idle = await engine.open_ids([9, 10, 11])
    await idle.generate(request(2, tokens=2))
    async with asyncio.timeout(30):
      if act == "fork":
        await stopped.fork(2)
      else:
        await stopped.generate(request(3, tokens=3, stop_strings=("~",)))

  asyncio.run(main())


def test_pages_are_given_back(make_engine):
  engine = make_engine(cache_tokens=96, prefix_reuse="none")
  (pool,) = engine.scheduler.lanes[0].slots.pools
  free = pool.free
  run_episodes(engine, range(9))
  engine.close()
  assert pool.free == free
