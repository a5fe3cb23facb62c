"""New weights while programs sample: every token is of the weights that its version names."""

import asyncio
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest, address_key

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


FIELDS = ("token_ids", "versions", "log_probs")
