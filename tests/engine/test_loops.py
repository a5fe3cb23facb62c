"""A looped policy whose start states go by the sequence, through the engine."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import Engine, SampleRequest, SlotEngine, address_key
from tests.engine.conftest import sizes, text
from tests.engine.generate import generate
from tests.models.rows import pack

LOOPED = models.ModelConfig(
  vocab_size=48,
  d_model=32,
  pattern="*-V-*-",
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
  rope_theta=100.0,
  d_mlp=32,
  init_scale=2.0,
  loop=models.LoopConfig(2, 2, mean_depth=2),
)
PROMPTS = [[7, 3, 9, 9, 1], [7, 3, 9, 4], list(range(20))]


@pytest.fixture(scope="module")
def looped_params():
  return models.init(LOOPED, jax.random.key(0))


def scored(params, tokens, behind):
  """The trainer's log-probs of the tokens of a sequence that stands behind another one."""
  rows = pack([np.asarray(behind), np.asarray(tokens)], [[0, None, 1]], 64)
  log_probs = jax.jit(models.score_tokens, static_argnums=1)(params, LOOPED, *rows).log_probs
  return np.asarray(log_probs)[np.asarray(rows.segment_ids) == 2]


def test_the_trainer_scores_what_forked_slots_drew(looped_params):
  """Prompts taken in by pieces, forks of one prompt, slots used again; packed rows in training."""
  engine = SlotEngine(LOOPED, sizes())
  engine.publish(looped_params, 0)
  for prompt, samples in zip(
    PROMPTS, generate(engine, PROMPTS, seed=0, max_tokens=10, samples=3), strict=True
  ):
    for sample in samples:
      tokens = [*prompt, *sample.token_ids]
      wanted = scored(looped_params, tokens, behind=[5, 6, 7])[len(prompt) :]
      np.testing.assert_allclose(sample.behaviour_log_probs, wanted, atol=3e-5)
  swapped = [*PROMPTS[0][::-1], *tokens[len(prompt) :]]
  assert np.max(np.abs(scored(looped_params, swapped, behind=[1])[5:] - wanted)) > 1e-3


def test_kept_prefixes_turns_and_forks_go_on_from_their_own_history(looped_params):
  """Against an engine that keeps nothing and takes everything in again."""
  shared = list(range(3, 36))

  def play(**changes):
    engine = Engine(LOOPED, sizes(**changes), decode=text, devices=jax.local_devices()[:1])
    engine.publish(looped_params, 0)

    async def run():
      samples = []
      for i, tail in enumerate(([40], [41, 42], [40])):
        context = await engine.open_ids([*shared, *tail])
        request = SampleRequest(address_key(0, i), 4)
        samples.append(await context.generate(request))
        for fork in await context.fork(2):
          await fork.extend([1 + i])
          samples.append(await fork.generate(request))
          fork.close()
        context.close()
      return samples

    try:
      return asyncio.run(run()), engine.stats.reused_tokens
    finally:
      engine.close()

  expected, nothing = play(prefix_reuse="none")
  found, reused = play(snapshot_tokens=16)
  assert nothing == 0 < reused
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.behaviour_log_probs, b.behaviour_log_probs)
