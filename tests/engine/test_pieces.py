"""Contexts that begin with pieces: what they sample, what they share, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import ContextLengthError, Engine, EngineError, SlotEngine
from agentjax.models.pieces import join_pieces, run_piece
from tests.engine.conftest import sizes
from tests.engine.test_devices import finish, start
from tests.engine.test_scheduler import PROMPTS, free_slots, request, run_episodes
from tests.models.rows import TINY, draw
from tests.sharding.test_families_on_eight_devices import FAMILIES

LENGTHS = (5, 11, 8)
TAIL = [4, 5, 6, 1, 2]
_extend = jax.jit(models.extend, static_argnums=1)
_step = jax.jit(models.decode_step, static_argnums=1)


def made(config, params):
  """Pieces of random tokens."""
  rng = np.random.default_rng(3)
  decode = models.prepare_decode_params(params, config)
  runs = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in LENGTHS]
  return decode, [jax.device_get(run_piece(decode, config, run)) for run in runs]


def log_probs(decode, config, pieces, ids) -> np.ndarray:
  """Of every id behind the pieces but the first, one token after the other in a joined slot."""
  cache = join_pieces(decode, config, pieces, 64)
  found = []
  for token in ids:
    if found:
      found[-1] = jax.nn.log_softmax(found[-1])[0, token]
    out = _step(decode, config, cache, jnp.asarray([token]), jnp.array([True]))
    cache = out.cache
    found.append(out.logits)
  return np.asarray(found[:-1], np.float32)


async def sample(engine, held, index: int, *, tail=TAIL, tokens: int = 11):
  context = await engine.open_pieces(held)
  await context.extend(tail)
  result = await context.generate(request(index, tokens=tokens))
  context.close()
  return result


def check(decode, config, pieces, result, tail=TAIL) -> None:
  expected = log_probs(decode, config, pieces, [*tail, *result.token_ids.tolist()])
  np.testing.assert_allclose(result.behaviour_log_probs, expected[len(tail) - 1 :], atol=1e-5)


ORDERS = [(0, 1, 2), (2, 1), (1, 1, 0), (1,), (0, 2), (2, 0)]


@pytest.mark.parametrize(
  "changes", [{}, {"host_turns": 0}, {"cache_tokens": 64}, {"slots": 8, "lanes": 2}]
)
def test_contexts_of_pieces_sample_what_joined_slots_would(
  make_engine, model_config, params, changes
):
  """More than there are slots for, or pages; among contexts without pieces."""
  engine = make_engine(pieces=True, **changes)
  decode, pieces = made(model_config, params)
  held = [engine.keep_piece(piece, 0) for piece in pieces]

  async def main():
    plain = [await engine.open_ids(PROMPTS[i]) for i in range(3)]
    every = [sample(engine, [held[i] for i in order], n) for n, order in enumerate(ORDERS)]
    return await asyncio.gather(*every, *(c.generate(request(i)) for i, c in enumerate(plain)))

  results = asyncio.run(main())
  for order, result in zip(ORDERS, results, strict=False):
    check(decode, model_config, [pieces[i] for i in order], result)
  for i, result in enumerate(results[len(ORDERS) :]):
    other = make_engine()

    async def alone(i: int = i, engine: Engine = other):
      return await (await engine.open_ids(PROMPTS[i])).generate(request(i))

    plain = asyncio.run(alone())
    np.testing.assert_array_equal(result.token_ids, plain.token_ids)
    np.testing.assert_allclose(result.behaviour_log_probs, plain.behaviour_log_probs, atol=1e-5)


@pytest.mark.parametrize("name", ["youtu", pytest.param("gemma4_e2b", marks=pytest.mark.slow)])
def test_latents_windows_and_lent_keys(name):
  config = FAMILIES[name]
  params = draw(config, seed=0)
  engine = Engine(config, sizes(pieces=True), devices=jax.local_devices()[:1])
  engine.publish(params, 0)
  decode, pieces = made(config, params)
  held = [engine.keep_piece(piece, 0) for piece in pieces]
  result = asyncio.run(sample(engine, held[::-1], 0))
  engine.close()
  check(decode, config, pieces[::-1], result)


@pytest.mark.parametrize("pattern", ["*", "M"])
def test_pieces_may_stand_anywhere(pattern):
  """One layer reads embeddings, which no context changes: pieces are the ids they were made of."""
  config = dataclasses.replace(TINY, pattern=pattern)
  params = draw(config, seed=0)
  decode = models.prepare_decode_params(params, config)
  runs = [PROMPTS[0], [3, 1, 2, 8, 9], [7] * 11, [5], [6, 6, 4]]
  made = [jax.device_get(run_piece(decode, config, np.asarray(run, np.int32))) for run in runs]
  engine = Engine(config, sizes(pieces=True), devices=jax.local_devices()[:1])
  engine.publish(params, 0)
  held = [engine.keep_piece(piece, 0) for piece in made]

  async def play(*, apart: bool):
    async def append(context, *chosen: int):
      if apart:
        await context.append_pieces([held[i] for i in chosen])
      else:
        for i in chosen:
          await context.extend(runs[i])

    context = await engine.open_ids(runs[0])
    samples = [await context.generate(request(0, tokens=5))]
    await append(context, 1, 2)
    await context.extend(TAIL)
    samples.append(await context.generate(request(1, tokens=3)))
    (twin,) = await context.fork(1)
    for member in (context, twin):
      await append(member, 3)
      await append(member, 4)
      await member.extend([2])
      samples.append(await member.generate(request(2, tokens=6)))
    return samples, [len(member) for member in (context, twin)]

  found, lengths = asyncio.run(play(apart=True))
  expected, plain = asyncio.run(play(apart=False))
  assert lengths == plain
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_allclose(one.behaviour_log_probs, other.behaviour_log_probs, atol=1e-5)
  engine.close()


def test_narrow_pages(make_engine, model_config, params):
  engine = make_engine(pieces=True, cache_dtype="int8")
  decode, pieces = made(model_config, params)
  result = asyncio.run(sample(engine, [engine.keep_piece(piece, 0) for piece in pieces], 0))
  expected = log_probs(decode, model_config, pieces, [*TAIL, *result.token_ids.tolist()])
  apart = np.max(np.abs(result.behaviour_log_probs - expected[len(TAIL) - 1 :]))
  assert 1e-6 < apart < 0.05


def test_all_contexts_have_the_same_pages_of_a_piece(make_engine, model_config, params):
  engine = make_engine(pieces=True)
  _, pieces = made(model_config, params)
  held = [engine.keep_piece(piece, 0) for piece in pieces]
  (pool,) = engine.scheduler.lanes[0].slots.pools

  async def main():
    whole = pool.free
    first = await engine.open_pieces(held)
    members = [*(await first.fork(2)), await engine.open_pieces(held[::-1])]
    for i, member in enumerate(members):
      await member.extend(TAIL)
      await member.generate(request(i, tokens=3))
    used = whole - pool.free
    holders = [pool.holders(block) for piece in held for block in piece.blocks]
    for member in [first, *members]:
      member.close()
    return used, holders

  used, holders = asyncio.run(main())
  # Four pages of pieces, and one for what each of the three contexts has taken in since.
  assert (used, holders) == (4 + 3, [3] * 4)
  assert free_slots(engine) == 4


def test_a_context_of_pieces_forks_waits_and_goes_on(make_engine, model_config, params):
  engine = make_engine(pieces=True, host_turns=0)
  decode, pieces = made(model_config, params)
  held = [engine.keep_piece(piece, 0) for piece in pieces]

  async def main():
    context = await engine.open_pieces(held)
    await context.extend(TAIL)
    first = await context.generate(request(0, tokens=4))
    (twin,) = await context.fork(1)
    run = asyncio.gather(*(sample(engine, held[:1], n) for n in range(1, 7)))
    await run  # others have the slots meanwhile
    rest = []
    for member in (context, twin):
      await member.extend([9, 3])
      rest.append(await member.generate(request(8, tokens=6)))
    return first, rest, len(context), context.room

  first, (one, other), length, room = asyncio.run(main())
  np.testing.assert_array_equal(one.token_ids, other.token_ids)
  np.testing.assert_array_equal(one.behaviour_log_probs, other.behaviour_log_probs)
  check(decode, model_config, pieces, one, [*TAIL, *first.token_ids.tolist(), 9, 3])
  assert length == sum(LENGTHS) + len(TAIL) + 4 + 2 + 6 and room == 64 - length - 8
  assert engine.stats.parked > 0


def test_contexts_of_pieces_are_never_beginnings_of_others(make_engine, model_config, params):
  engine = make_engine(pieces=True, prefix_reuse="turns")
  decode, pieces = made(model_config, params)
  held = [engine.keep_piece(piece, 0) for piece in pieces]

  async def main():
    await sample(engine, held[:2], 0)
    return await sample(engine, held[1:], 1)

  check(decode, model_config, pieces[1:], asyncio.run(main()))
  assert engine.stats.reused_tokens == 0


def test_what_cannot_begin_a_context_is_refused(make_engine, model_config, params, other_params):
  engine = make_engine(pieces=True)
  _, pieces = made(model_config, params)
  held = [engine.keep_piece(piece, 0) for piece in pieces]

  async def opened(*chosen):
    return await engine.open_pieces(chosen)

  with pytest.raises(ContextLengthError, match="8 pieces of 64 tokens take 64 places"):
    asyncio.run(opened(*[held[2]] * 8))
  with pytest.raises(ValueError, match="0 pieces"):
    asyncio.run(opened())

  async def bare():
    context = await opened(*held)
    with pytest.raises(ContextLengthError, match="a context of 24 tokens cannot take 33 more"):
      await context.extend([1] * 33)
    await context.generate(request(0))

  with pytest.raises(ValueError, match="pieces alone cannot sample"):
    asyncio.run(bare())
  engine.publish(other_params, 1)
  with pytest.raises(EngineError, match=r"versions \[0\] cannot be joined by weights of version 1"):
    asyncio.run(opened(*held))
  with pytest.raises(EngineError, match="engine.pieces=False with 1 policies"):
    make_engine().keep_piece(pieces[0], 0)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"speculate": "ngram"}, "engine.speculate"),
    ({"record_experts": True}, "engine.record_experts"),
  ],
)
def test_settings_that_pieces_do_not_go_with(model_config, changes, message):
  with pytest.raises(ConfigError, match=message):
    SlotEngine(model_config, sizes(pieces=True, **changes))
  looped = dataclasses.replace(
    model_config, pattern="*-*-*-", loop=models.LoopConfig(2, 2, mean_depth=2)
  )
  with pytest.raises(ConfigError, match="engine.pieces=True"):
    SlotEngine(looped, sizes(pieces=True))


def test_without_pieces_an_engine_samples_the_same(make_engine):
  found, expected = (run_episodes(make_engine(pieces=p), range(3)) for p in (True, False))
  for i, samples in expected.items():
    for one, other in zip(found[i], samples, strict=True):
      np.testing.assert_array_equal(one.token_ids, other.token_ids)
      np.testing.assert_allclose(one.behaviour_log_probs, other.behaviour_log_probs, atol=1e-5)


_ON_TWO_DEVICES = """
import asyncio, dataclasses
import jax, numpy as np
from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest
from agentjax.models.pieces import run_piece
from agentjax.sharding import MeshConfig
from tests.models.rows import TINY, draw

config = dataclasses.replace(TINY, pattern="M*-")
params = draw(config, seed=0)
decode = models.prepare_decode_params(params, config)
runs = [np.arange(n, dtype=np.int32) for n in (5, 11, 8)]
pieces = [jax.device_get(run_piece(decode, config, run)) for run in runs]

def sampled(**mesh):
  engine = Engine(config, EngineConfig(
      slots=2, max_length=64, chunk_tokens=4, extend_buckets=(8,), extend_rows=(2,), block_tokens=8,
      pieces=True, warmup=False, mesh=MeshConfig(fsdp=1, **mesh)))
  engine.publish(params, 0)
  held = [engine.keep_piece(piece, 0) for piece in pieces]
  async def one(order):
    context = await engine.open_pieces([held[i] for i in order])
    await context.extend([4, 5, 6])
    return await context.generate(SampleRequest((1, 2), 6))
  async def main():
    return await asyncio.gather(*(one(order) for order in ((0, 1, 2), (2, 0), (1, 1))))
  found = asyncio.run(main())
  state = jax.tree.leaves(engine.scheduler.lanes[0].slots.device.state)
  engine.close()
  return found, any("tensor" in str(v.sharding) and not v.is_fully_replicated for v in state)

one, whole = sampled()
two, split = sampled(tensor=2)
assert split and not whole
for a, b in zip(one, two, strict=True):
  np.testing.assert_array_equal(a.token_ids, b.token_ids)
  np.testing.assert_allclose(a.behaviour_log_probs, b.behaviour_log_probs, atol=1e-5)
"""


@pytest.mark.slow
def test_pieces_on_two_devices_that_share_heads():
  finish(start(_ON_TWO_DEVICES, 2), seconds=600)
