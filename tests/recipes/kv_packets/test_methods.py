"""Ways to reuse documents, and the training of an adapter, against recomputing everything."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.recipes.kv_packets.adapter import init_adapter
from agentjax.recipes.kv_packets.methods import (
  joined,
  parts,
  whole,
  with_changed_tokens,
  with_first_tokens,
)
from agentjax.recipes.kv_packets.questions import Questions, continued, greedy
from agentjax.recipes.kv_packets.training import (
  AdapterTraining,
  distillation_loss,
  own_answers,
  train_adapter,
)
from tests.models.rows import TINY, draw

ATTENTION = dataclasses.replace(TINY, pattern="*-*-*")
LATENT_FREE = dataclasses.replace(ATTENTION, rope_theta=None)
HYBRID = dataclasses.replace(TINY, pattern="M*-M*")
LENGTH = 6


def asked(count: int = 2, documents: int = 3, seed: int = 0) -> Questions:
  rng = np.random.default_rng(seed)
  shapes = ((count, 2), (count, documents, LENGTH), (count, 3), (count, 2))
  return Questions(*(jnp.asarray(rng.integers(0, TINY.vocab_size, s), jnp.int32) for s in shapes))


def prepared(config):
  params = draw(config, seed=0)
  return params, models.prepare_decode_params(params, config)


def logits(params, config, cache, questions: Questions) -> np.ndarray:
  return np.asarray(continued(params, config, cache, questions.prompts)[0])


@pytest.mark.parametrize("config", [ATTENTION, LATENT_FREE], ids=["positions", "none"])
def test_all_tokens_computed_again_are_the_whole_context(config):
  _, params = prepared(config)
  questions = asked()
  made = parts(params, config, questions)
  expected = whole(params, config, questions, 3)
  found = {
    "first": with_first_tokens(params, config, made, questions, 3, tokens=LENGTH),
    "changed": with_changed_tokens(params, config, made, questions, 3, share=1.0),
  }
  apart = logits(params, config, joined(params, config, made, 3), questions)
  wanted = logits(params, config, expected, questions)
  assert np.max(np.abs(apart - wanted)) > 1e-2
  for cache in found.values():
    np.testing.assert_allclose(logits(params, config, cache, questions), wanted, atol=1e-4)
    for one, other in zip(cache.blocks, expected.blocks, strict=True):
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one, other)


def test_tokens_that_are_not_chosen_stay_as_they_were_made():
  _, params = prepared(ATTENTION)
  questions = asked()
  made = parts(params, ATTENTION, questions)
  before = joined(params, ATTENTION, made, 3).blocks[2].keys
  total = questions.context.shape[1]
  first = with_first_tokens(params, ATTENTION, made, questions, 3, tokens=2).blocks[2].keys
  moved = np.any(np.abs(np.asarray(first - before)) > 1e-6, axis=(1, 3))
  starts = 2 + LENGTH * np.arange(3)
  expected = np.zeros_like(moved)
  expected[:, np.concatenate([starts, starts + 1])] = True
  np.testing.assert_array_equal(moved, expected)
  changed = with_changed_tokens(params, ATTENTION, made, questions, 3, share=5 / total)
  found, held = changed.blocks[2].keys, joined(params, ATTENTION, made, 3).blocks[2]
  exact = whole(params, ATTENTION, questions, 3).blocks[2]
  pairs = ((exact.keys, held.keys), (exact.values, held.values))
  apart = sum(np.sum(np.square(np.asarray(a - b)), axis=(1, 3)) for a, b in pairs)
  kept = np.any(np.abs(np.asarray(found - before)) > 1e-6, axis=(1, 3))
  for row in range(2):
    places = np.argsort(-apart[row])[:5]
    assert set(np.flatnonzero(kept[row])) == set(places)
    np.testing.assert_allclose(found[row, :, places], exact.keys[row, :, places], atol=1e-5)


def test_recurrent_layers_cannot_run_single_tokens_again():
  _, params = prepared(HYBRID)
  questions = asked()
  made = parts(params, HYBRID, questions)
  with pytest.raises(ConfigError, match="none of M"):
    with_first_tokens(params, HYBRID, made, questions, 3, tokens=1)
  with pytest.raises(ConfigError, match="none of M"):
    with_changed_tokens(params, HYBRID, made, questions, 3, share=0.5)


def test_own_answers_are_drawn_token_by_token_from_the_whole_context():
  _, params = prepared(HYBRID)
  questions = asked()
  found = own_answers(params, HYBRID, questions)
  ids = jnp.concatenate([questions.context, questions.prompts], axis=1)
  for _ in range(2):
    empty = models.init_cache(HYBRID, 2, 32)
    out, _ = continued(params, HYBRID, empty, ids)
    ids = jnp.concatenate([ids, jnp.argmax(out[:, -1:], axis=-1)], axis=1)
  np.testing.assert_array_equal(found, ids[:, -2:])


@pytest.mark.parametrize("config", [ATTENTION, HYBRID], ids=["attention", "hybrid"])
def test_the_gradient_of_an_adapter_is_that_of_the_loss(config):
  params, decode = prepared(config)
  adapter = init_adapter(params, jax.random.key(0), header=2, trailer=2)
  questions = asked()
  answers = own_answers(decode, config, questions)

  def loss(adapter):
    return distillation_loss(adapter, decode, config, questions, answers)

  value, gradient = jax.jit(jax.value_and_grad(loss))(adapter)
  assert value > 0
  direction = jax.tree.map(lambda v: jax.random.normal(jax.random.key(2), v.shape), adapter)
  size = 3e-3
  ends = [
    float(jax.jit(loss)(jax.tree.map(lambda v, d, s=s: v + s * size * d, adapter, direction)))
    for s in (1, -1)
  ]
  slope = sum(
    jnp.vdot(g, d)
    for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
  )
  np.testing.assert_allclose((ends[0] - ends[1]) / (2 * size), slope, rtol=2e-2, atol=1e-3)


def test_training_brings_answers_behind_packets_nearer_to_the_models_own():
  params, decode = prepared(HYBRID)
  drawn = init_adapter(params, jax.random.key(0), header=2, trailer=2)
  sources = [asked(8, seed=1), asked(8, documents=2, seed=2)]
  settings = AdapterTraining(learning_rate=2e-2, epochs=12, batch=4)
  adapter, losses = train_adapter(drawn, decode, HYBRID, sources, settings)
  assert len(losses) == 12 * 4
  assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
  questions = sources[0]
  answers = own_answers(decode, HYBRID, questions)
  before, after = (
    float(distillation_loss(a, decode, HYBRID, questions, answers)) for a in (drawn, adapter)
  )
  assert after < before
  cache = joined(decode, HYBRID, parts(decode, HYBRID, questions, adapter), 5)
  assert greedy(decode, HYBRID, cache, questions.prompts, 2).shape == (8, 2)
