"""Distributions, filters and addressing of single draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from agentjax.config import ConfigError
from agentjax.engine import SamplingConfig, address_key
from agentjax.engine.sampling import Draws, Filters, draw, kept_tokens

VOCAB = 12
LOGITS = np.random.default_rng(0).permutation(np.linspace(2.0, -2.0, VOCAB, dtype=np.float32))


def draws(logits, *, keys=None, index=None, forced=None, vocab_limit=None, **settings) -> Draws:
  """Draws one token a row of ``logits``; row r has token index r unless told otherwise."""
  rows = logits.shape[0]
  config = SamplingConfig(**settings)
  filters = Filters(
    jnp.full(rows, config.temperature, jnp.float32),
    jnp.full(rows, config.top_k, jnp.int32),
    jnp.full(rows, config.top_p, jnp.float32),
    jnp.full(rows, config.min_p, jnp.float32),
  )
  return jax.device_get(
    jax.jit(draw, static_argnames="vocab_limit")(
      jnp.asarray(logits),
      jnp.tile(address_key(7), (rows, 1)) if keys is None else keys,
      jnp.arange(rows) if index is None else index,
      filters,
      jnp.full(rows, -1) if forced is None else forced,
      vocab_limit=vocab_limit,
    )
  )


def softmax(x: np.ndarray) -> np.ndarray:
  weights = np.exp(x.astype(np.float64) - x.max())
  return weights / weights.sum()


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
  """The filters one after the other, on sorted float64 probabilities."""
  order = np.argsort(-logits)[: top_k or len(logits)]
  probs = softmax(logits)[order]
  if top_p < 1.0:
    before = np.cumsum(probs) - probs
    order = order[before < top_p * probs.sum()]
  return {int(i) for i in order if softmax(logits)[i] >= min_p * softmax(logits).max()}


@pytest.mark.parametrize(
  "settings",
  [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.15},
  ],
  ids=str,
)
def test_draws_follow_the_filtered_distribution(settings):
  count = 20_000
  found = draws(np.tile(LOGITS, (count, 1)), **settings)
  scaled = LOGITS / settings.get("temperature", 1.0)
  kept = kept_by_sorting(
    scaled, settings.get("top_k", 0), settings.get("top_p", 1.0), settings.get("min_p", 0.0)
  )
  expected = np.where([i in kept for i in range(VOCAB)], softmax(scaled), 0.0)
  expected /= expected.sum()
  observed = np.bincount(found.token_ids, minlength=VOCAB)
  assert observed[expected == 0].sum() == 0
  some = expected > 0
  # One fixed draw: an honest sampler fails at this level with probability 1e-4 a case.
  assert scipy.stats.chisquare(observed[some], count * expected[some]).pvalue > 1e-4
  np.testing.assert_allclose(found.sampling_log_probs, np.log(expected[found.token_ids]), atol=2e-6)
  # What the trainer recomputes knows nothing of the filters.
  probs = softmax(scaled)
  np.testing.assert_allclose(found.behaviour_log_probs, np.log(probs[found.token_ids]), atol=2e-6)
  np.testing.assert_allclose(found.entropies, -(probs * np.log(probs)).sum(), rtol=2e-6)


def test_filters_keep_what_sorting_keeps():
  rng = np.random.default_rng(1)
  rows, vocab = 300, 200
  logits = (rng.normal(size=(rows, vocab)) * rng.choice([0.1, 1, 8], size=(rows, 1))).astype(
    np.float32
  )
  top_k = rng.integers(0, vocab + 3, rows)
  top_p = np.where(rng.random(rows) < 0.3, 1.0, rng.uniform(0.01, 0.999, rows)).astype(np.float32)
  min_p = np.where(rng.random(rows) < 0.5, 0.0, rng.random(rows)).astype(np.float32)
  kept = np.asarray(
    jax.jit(kept_tokens)(logits, Filters(np.ones(rows, np.float32), top_k, top_p, min_p))
  )
  for row in range(rows):
    wanted = kept_by_sorting(logits[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
    assert set(np.flatnonzero(kept[row])) == wanted, row


def test_temperature_zero_takes_the_best_token_and_reports_temperature_one():
  found = draws(np.tile(LOGITS, (8, 1)), temperature=0.0)
  assert set(found.token_ids) == {int(LOGITS.argmax())}
  np.testing.assert_allclose(found.behaviour_log_probs, np.log(softmax(LOGITS).max()), atol=1e-6)
  np.testing.assert_array_equal(found.sampling_log_probs, 0.0)


def test_a_draw_depends_on_key_index_and_logits_only():
  rng = np.random.default_rng(2)
  logits = rng.normal(size=(16, VOCAB)).astype(np.float32)
  keys = np.stack([address_key(0, i) for i in range(16)])
  index = rng.integers(0, 99, 16)
  order = rng.permutation(16)
  for settings in ({}, {"top_p": 0.7, "top_k": 5}):
    straight = draws(logits, keys=keys, index=index, **settings)
    shuffled = draws(logits[order], keys=keys[order], index=index[order], **settings)
    for a, b in zip(straight, shuffled, strict=True):
      np.testing.assert_array_equal(a[order], b)


def test_keys_and_indices_give_other_draws():
  logits = np.zeros((64, 4096), np.float32)
  by_index = draws(logits).token_ids
  keys = np.stack([address_key(0, i) for i in range(64)])
  by_key = draws(logits, keys=keys, index=np.zeros(64, np.int32)).token_ids
  assert len(set(by_index)) > 60 and len(set(by_key)) > 60


def test_forced_tokens_are_scored_not_drawn():
  forced = np.arange(-1, VOCAB - 1)
  found = draws(np.tile(LOGITS, (VOCAB, 1)), forced=forced)
  np.testing.assert_array_equal(found.token_ids[1:], forced[1:])
  np.testing.assert_allclose(
    found.behaviour_log_probs[1:], np.log(softmax(LOGITS))[forced[1:]], atol=2e-6
  )


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.9}], ids=str)
def test_ids_past_the_limit_are_never_drawn_but_count_in_log_probs(settings):
  logits = np.tile(np.linspace(-1, 1, VOCAB, dtype=np.float32), (500, 1))
  found = draws(logits, vocab_limit=5, **settings)
  assert found.token_ids.max() < 5
  np.testing.assert_allclose(
    found.behaviour_log_probs, np.log(softmax(logits[0]))[found.token_ids], atol=2e-6
  )


def test_address_keys_are_stable_and_distinct():
  np.testing.assert_array_equal(address_key(3, 1, 4, 1), address_key(3, 1, 4, 1))
  keys = {
    tuple(address_key(seed, *address))
    for seed in (0, 1)
    for address in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (2**40, 1)]
  }
  assert len(keys) == 14
  # A changed value would make every journal written before it unreadable.
  assert address_key(3, 1, 4, 1).tolist() == [1351223226, 4084494771]


@pytest.mark.parametrize(
  "settings", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}], ids=str
)
def test_impossible_sampling_settings_name_the_field(settings):
  with pytest.raises(ConfigError, match=f"sampling.{next(iter(settings))}"):
    SamplingConfig(**settings).validate()
