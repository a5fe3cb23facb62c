"""Ways to reuse documents, and the training of an adapter, against recomputing everything."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.recipes.kv_packets.adapter import init_adapter, read_adapter, write_adapter
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
  measured_divergence,
  own_answers,
  train_adapter,
)
from tests.models.rows import TINY, draw

ATTENTION = dataclasses.replace(TINY, pattern="*-*-*")
NO_POSITIONS = dataclasses.replace(ATTENTION, rope_theta=None)
HYBRID = dataclasses.replace(TINY, pattern="M*-M*")
LENGTH = 6
_continued = jax.jit(continued, static_argnums=1)


def asked(count: int = 2, documents: int = 3, seed: int = 0) -> Questions:
  rng = np.random.default_rng(seed)
  shapes = ((count, 2), (count, documents, LENGTH), (count, 3), (count, 2))
  return Questions(*(jnp.asarray(rng.integers(0, TINY.vocab_size, s), jnp.int32) for s in shapes))


def prepared(config):
  params = draw(config, seed=0)
  return params, models.prepare_decode_params(params, config)


def reused(method, params, config, questions: Questions, **how):
  """The cache that a method of parts in memory gives."""

  @jax.jit
  def run(params, questions):
    return method(params, config, parts(params, config, questions), questions, 3, **how)

  return run(params, questions)


def apart(params, config, made, questions, room):
  del questions
  return joined(params, config, made, room)


def alone(params, config, made, questions, room):
  del made
  return whole(params, config, questions, room)


def logits(params, config, cache, questions: Questions) -> np.ndarray:
  return np.asarray(_continued(params, config, cache, questions.prompts)[0])


@pytest.mark.parametrize("config", [ATTENTION, NO_POSITIONS], ids=["positions", "none"])
def test_all_tokens_computed_again_are_the_whole_context(config):
  _, params = prepared(config)
  questions = asked()
  expected = reused(alone, params, config, questions)
  wanted = logits(params, config, expected, questions)
  nothing = reused(apart, params, config, questions)
  assert np.max(np.abs(logits(params, config, nothing, questions) - wanted)) > 1e-2
  for method, how in ((with_first_tokens, {"tokens": LENGTH}), (with_changed_tokens, {"share": 1})):
    cache = reused(method, params, config, questions, **how)
    np.testing.assert_allclose(logits(params, config, cache, questions), wanted, atol=1e-4)
    for one, other in zip(cache.blocks, expected.blocks, strict=True):
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one, other)


def test_tokens_that_are_not_chosen_stay_as_they_were_made():
  """Of the second attention layer."""
  _, params = prepared(ATTENTION)
  questions = asked()
  held, exact = (reused(m, params, ATTENTION, questions).blocks[2] for m in (apart, alone))
  first = reused(with_first_tokens, params, ATTENTION, questions, tokens=2).blocks[2]
  starts = 2 + LENGTH * np.arange(3)
  np.testing.assert_array_equal(
    moved(first, held), [np.isin(np.arange(held.keys.shape[2]), [*starts, *(starts + 1)])] * 2
  )
  share = 5 / questions.context.shape[1]
  changed = reused(with_changed_tokens, params, ATTENTION, questions, share=share).blocks[2]
  pairs = ((exact.keys, held.keys), (exact.values, held.values))
  distances = sum(np.sum(np.square(np.asarray(a - b)), axis=(1, 3)) for a, b in pairs)
  for row, kept in enumerate(moved(changed, held)):
    places = np.argsort(-distances[row])[:5]
    assert set(np.flatnonzero(kept)) == set(places)
    np.testing.assert_allclose(changed.keys[row, :, places], exact.keys[row, :, places], atol=1e-5)


def moved(one, other) -> np.ndarray:
  """Which tokens of each slot have other keys, bool [slots, length]."""
  return np.any(np.abs(np.asarray(one.keys - other.keys)) > 1e-6, axis=(1, 3))


def test_recurrent_layers_cannot_run_single_tokens_again():
  _, params = prepared(HYBRID)
  for method, how in ((with_first_tokens, {"tokens": 1}), (with_changed_tokens, {"share": 0.5})):
    with pytest.raises(ConfigError, match="none of M"):
      reused(method, params, HYBRID, asked(), **how)


def test_own_answers_are_drawn_token_by_token_from_the_whole_context():
  _, params = prepared(HYBRID)
  questions = asked()
  found = own_answers(params, HYBRID, questions)
  ids = jnp.concatenate([questions.context, questions.prompts], axis=1)
  for _ in range(2):
    empty = models.init_cache(HYBRID, 2, 32)
    out, _ = _continued(params, HYBRID, empty, ids)
    ids = jnp.concatenate([ids, jnp.argmax(out[:, -1:], axis=-1)], axis=1)
  np.testing.assert_array_equal(found, ids[:, -2:])


@pytest.mark.slow
@pytest.mark.parametrize(
  "config",
  [
    pytest.param(ATTENTION, id="attention", marks=pytest.mark.slow),
    pytest.param(HYBRID, id="hybrid"),
  ],
)
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


@pytest.mark.slow
def test_training_brings_answers_behind_packets_nearer_to_the_models_own(tmp_path):
  params, decode = prepared(HYBRID)
  drawn = init_adapter(params, jax.random.key(0), header=2, trailer=2)
  sources = [asked(8, seed=1), asked(8, documents=2, seed=2)]
  settings = AdapterTraining(learning_rate=2e-2, epochs=12, batch=4)
  adapter, losses = train_adapter(drawn, decode, HYBRID, sources, settings)
  assert len(losses) == 12 * 4
  assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
  questions = sources[0]
  answers = own_answers(decode, HYBRID, questions)
  before, after = (measured_divergence(a, decode, HYBRID, questions, 4) for a in (drawn, adapter))
  assert after < before
  loss = jax.jit(distillation_loss, static_argnums=2)(adapter, decode, HYBRID, questions, answers)
  np.testing.assert_allclose(after, loss, rtol=1e-4)
  write_adapter(tmp_path / "adapter", adapter)
  read = read_adapter(tmp_path / "adapter")
  jax.tree.map(np.testing.assert_array_equal, read, adapter)
  cache = joined(decode, HYBRID, parts(decode, HYBRID, questions, adapter), 5)
  assert greedy(decode, HYBRID, cache, questions.prompts, 2).shape == (8, 2)
