"""A window of tokens, kept in part, leaves what decoding the kept ones would leave."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.config import MlaConfig
from tests.models.rows import TINY, draw

SLOTS, LENGTH, WINDOW = 4, 24, 4
LATENT = dataclasses.replace(
  TINY,
  pattern="AM-A",
  qk_norm=False,
  mla=MlaConfig(query_lora=None, kv_lora=8, nope_dim=4, rope_dim=4, value_dim=4),
)


@functools.cache
def programs(config):
  return (
    jax.jit(functools.partial(models.decode_step, config=config)),
    jax.jit(functools.partial(models.verify, config=config)),
    jax.jit(functools.partial(models.accept, config=config)),
  )


def decoded(config, params, cache, ids, counts):
  """The first ``counts[s]`` ids of every slot, one by one: logits [slots, window, vocab]."""
  step, logits = programs(config)[0], []
  for j in range(ids.shape[1]):
    out = step(params, cache=cache, token_ids=ids[:, j], active=j < counts)
    cache = out.cache
    logits.append(out.logits)
  return jnp.stack(logits, axis=1), cache


@pytest.mark.parametrize("config", [TINY, LATENT], ids=["hybrid", "latent"])
def test_a_window_kept_in_part_equals_decoding_what_is_kept(config):
  config.validate()
  params = jax.jit(models.prepare_decode_params, static_argnums=1)(draw(config, seed=0), config)
  rng = np.random.default_rng(0)
  cache = models.init_cache(config, SLOTS, LENGTH)
  _, cache = decoded(
    config, params, cache, rng.integers(0, config.vocab_size, (SLOTS, 5)), np.array([5, 3, 0, 4])
  )
  reference, live = cache, np.array([True, True, True, False])
  _, verify, accept = programs(config)
  for counts in ([4, 1, 2, 0], [2, 4, 1, 0], [1, 3, 4, 0]):
    counts = np.array(counts)
    ids = rng.integers(0, config.vocab_size, (SLOTS, WINDOW))
    before = cache
    out = verify(params, cache=cache, token_ids=ids, active=live)
    cache = accept(params, lengths=cache.lengths, pending=out.pending, counts=counts)
    expected, reference = decoded(config, params, reference, ids, counts)
    for slot, count in enumerate(counts):
      np.testing.assert_allclose(
        out.logits[slot, :count], expected[slot, :count], atol=2e-5, err_msg=f"slot {slot}"
      )
    np.testing.assert_array_equal(cache.lengths, reference.lengths)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[3], b[3]), cache, before)
  follow = rng.integers(0, config.vocab_size, (SLOTS, 1))
  ours, _ = decoded(config, params, cache, follow, np.ones(SLOTS))
  theirs, _ = decoded(config, params, reference, follow, np.ones(SLOTS))
  np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_models_that_run_blocks_twice_say_why_they_cannot():
  assert models.unverifiable(TINY) is None
  twice = dataclasses.replace(TINY, second_pass=models.SecondPassConfig())
  assert "second_pass" in models.unverifiable(twice)
