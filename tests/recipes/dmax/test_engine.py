"""The engine of blocks, as programs use it."""

import asyncio
import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.engine import (
  ContextLengthError,
  EngineConfig,
  EngineError,
  Finish,
  NonFiniteError,
  SampleRequest,
  SamplingConfig,
)
from agentjax.recipes.dmax import DecodingConfig, DMaxConfig
from agentjax.recipes.dmax.engine import BlockEngine
from tests.recipes.dmax.dense import BLOCK, MASK, MODEL, SETTINGS, STOP, policy
from tests.recipes.dmax.test_decoding import PROMPTS, SHARP, _reference

CONFIG = EngineConfig(slots=2, max_length=24)
SOFT = DecodingConfig(threshold=0.4)


@contextlib.contextmanager
def engine(params=None, decoding=SOFT, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  dmax = DMaxConfig(block=BLOCK, mask_id=MASK, decoding=decoding)
  made = BlockEngine(MODEL, config, dmax, vocab_limit=SETTINGS.vocab_limit)
  made.publish(policy(1, SHARP) if params is None else params, 5)
  with contextlib.closing(made):
    yield made


def request(key=0, temperature=0.0, most=9, **more):
  sampling = SamplingConfig(temperature=temperature)
  return SampleRequest((key, 1), most, sampling, (STOP,), **more)


async def draw(made, prompt, key=0, temperature=0.0, most=9):
  context = await made.open(await made.prefill(prompt))
  sample = await context.generate(request(key, temperature, most))
  context.close()
  return sample


def gather(made, *calls):
  async def run():
    return await asyncio.gather(*(draw(made, *call) for call in calls))

  return asyncio.run(run())


def test_calls_share_slots_and_give_what_the_rules_say():
  with engine() as made:
    found = gather(made, *((prompt,) for prompt in PROMPTS))
    stats = made.stats
  forwards = commits = tokens = 0
  for prompt, sample in zip(PROMPTS, found, strict=True):
    wanted, passes, kept = _reference(policy(1, SHARP), prompt, SOFT, most=9)
    assert sample.token_ids.tolist() == wanted
    stopped = wanted[-1] == STOP
    assert sample.finish is (Finish.STOP if stopped else Finish.LENGTH)
    assert set(sample.versions) == {5}
    forwards, commits, tokens = forwards + passes, commits + kept, tokens + len(wanted)
  assert (stats.forwards, stats.commits, stats.sampled_tokens) == (forwards, commits, tokens)
  assert stats.tokens_per_decision == tokens / forwards
  assert stats.device_seconds > 0
  assert stats.tokens_per_forward == tokens / (forwards + commits)


def test_a_draw_follows_its_key_alone():
  with engine(slots=4) as made:
    calls = [(prompt, key, 1.5) for key in (1, 2) for prompt in PROMPTS]
    many = gather(made, *calls)
    alone = [gather(made, call)[0] for call in calls]
  for a, b in zip(many, alone, strict=True):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
  first, second = many[: len(PROMPTS)], many[len(PROMPTS) :]
  assert any(
    a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(first, second, strict=True)
  )


def test_a_conversation_grows_and_forks():
  async def run(made):
    context = await made.open_ids(PROMPTS[0][:3])
    await context.extend(PROMPTS[0][3:])
    (twin,) = await context.fork(1)
    first = await context.generate(request(most=3))
    assert len(context) == len(PROMPTS[0]) + len(first.token_ids)
    again = await twin.generate(request(most=3))
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    await context.extend([7])
    later = await context.generate(request(most=2))
    whole = await made.open_ids([*PROMPTS[0], *first.token_ids.tolist(), 7])
    fresh = await whole.generate(request(most=2))
    np.testing.assert_array_equal(later.token_ids, fresh.token_ids)
    with pytest.raises(ContextLengthError, match=r"allowed: engine.max_length=24"):
      await context.extend([1] * 24)
    context.close()
    with pytest.raises(EngineError, match="closed"):
      await context.generate(request())

  with engine() as made:
    asyncio.run(run(made))


def test_a_context_ends_where_it_is_full():
  with engine(max_length=8) as made:
    (sample,) = gather(made, (PROMPTS[3], 3, 3.0, 50))
  assert len(sample.token_ids) == 1
  stopped = sample.token_ids[0] == STOP
  assert sample.finish is (Finish.STOP if stopped else Finish.CONTEXT_FULL)


def test_what_blocks_cannot_do_is_refused():
  async def run(made):
    context = await made.open_ids([5])
    for bad in (
      request(stop_strings=("x",)),
      request(forced_ids=(1,)),
      dataclasses.replace(request(), sampling=SamplingConfig(top_k=3)),
    ):
      with pytest.raises(ValueError, match="allowed: none where tokens are drawn in blocks"):
        await context.generate(bad)

  with engine() as made:
    asyncio.run(run(made))


def test_log_probs_that_are_not_finite_end_a_call_alone():
  broken = policy(1, SHARP)
  table = broken.embedding.at[9].set(jnp.nan)
  with engine(broken.replace(embedding=table)) as made:

    async def run():
      bad = asyncio.ensure_future(draw(made, [9, 9]))
      good = await draw(made, PROMPTS[3])
      with pytest.raises(NonFiniteError):
        await bad
      return good

    good = asyncio.run(run()).token_ids.tolist()
  assert good == _reference(policy(1, SHARP), PROMPTS[3], SOFT, most=9)[0]  # it draws no 9
