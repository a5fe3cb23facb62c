"""Returns, GAE and token baselines on index sets, against loops, golden numbers and invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.objectives import returns
from agentjax.objectives.segments import runs, turn_units

gae = jax.jit(returns.gae)
bilevel_gae = jax.jit(returns.bilevel_gae)
reward_to_go = jax.jit(returns.reward_to_go)


def row(*values):
  return jnp.asarray(values, jnp.float32)[None]


def one_sequence(length):
  return jnp.ones((1, length), jnp.int32)


def chunks_of(mask):
  return runs(inside=mask > 0)


def test_golden_chunk_returns():
  mask = row(0, 1, 1, 0, 1, 1, 1, 0, 1)
  ours = reward_to_go(
    row(0, 0, 0, 0, 0, 0, 0, 0, 1), mask, one_sequence(9), gamma=0.9, units=chunks_of(mask)
  )
  np.testing.assert_allclose(ours, row(0, 0.81, 0.81, 0, 0.9, 0.9, 0.9, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
  "lam, expected", [(0.95, [0.7187, 0.546, 0, 0.68, 0.4]), (1.0, [0.8, 0.6, 0, 0.7, 0.4])]
)
def test_golden_gae_steps_over_an_observation(lam, expected):
  ours = gae(
    row(0, 0, 0, 0, 1),
    row(0.2, 0.4, 9, 0.3, 0.6),
    row(1, 1, 0, 1, 1),
    one_sequence(5),
    gamma=1.0,
    lam=lam,
  )
  np.testing.assert_allclose(ours[0], expected, atol=1e-6)


def test_golden_bilevel_gae_counts_turns_that_earn_nothing():
  mask = row(1, 1, 0, 1, 1)
  settings_ = dict(gamma=1.0, lam=0.95, unit_gamma=0.95)
  values = row(0.2, 0.4, 9, 0.3, 0.6)
  ours = bilevel_gae(
    row(0, -0.1, 0, 0, 1), values, mask, one_sequence(5), chunks_of(mask), **settings_
  )
  np.testing.assert_allclose(ours[0], [0.60945, 0.431, 0, 0.68, 0.4], atol=1e-6)
  silent = bilevel_gae(
    row(0, 0.0, 0, 0, 1), values, mask, one_sequence(5), chunks_of(mask), **settings_
  )
  # delta = .95 V_2 - V_1 and the discounted advantage of the second turn: .17 + .9025 * .4.
  np.testing.assert_allclose(silent[0, 1], 0.531, atol=1e-6)


def loop_gae(rewards, values, weights, segment_ids, gamma, lam):
  """One token after another, from the definition."""
  result = np.zeros_like(rewards)
  for b in range(rewards.shape[0]):
    for number in set(segment_ids[b]) - {0}:
      next_value, advantage = 0.0, 0.0
      for t in reversed(np.flatnonzero((segment_ids[b] == number) & (weights[b] > 0))):
        delta = rewards[b, t] + gamma * next_value - values[b, t]
        advantage = delta + gamma * lam * advantage
        next_value, result[b, t] = values[b, t], advantage
  return result


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.9, 1.0]))
def test_gae_on_packed_rows_equals_a_loop(seed, lam, gamma):
  random = np.random.default_rng(seed)
  segment_ids = np.array([[1, 1, 1, 1, 0, 2, 2, 3, 3, 3], [0, 4, 4, 4, 4, 4, 4, 4, 0, 5]])
  weights = (random.random((2, 10)) < 0.6) * (segment_ids > 0)
  rewards, values = random.normal(size=(2, 2, 10)).astype(np.float32)
  weighted = jnp.asarray(weights, jnp.float32)
  ours = gae(rewards, values, weighted, segment_ids, gamma=gamma, lam=lam)
  expected = loop_gae(rewards, values, weights, segment_ids, gamma, lam)
  np.testing.assert_allclose(ours, expected, atol=2e-5)
  # With lambda 1 the value target is the return.
  if lam == 1.0:
    to_go = loop_gae(rewards, 0 * values, weights, segment_ids, gamma, 1.0)
    np.testing.assert_allclose((ours + values) * weights, to_go * weights, atol=2e-5)


def test_more_tokens_in_a_turn_leave_turn_advantages_unchanged():
  """A turn is one step, however long: the credit of the first turn must not decay with tokens."""

  def first_turn(tokens):
    turns = jnp.asarray([0] * tokens + [1] * 2)[None]
    weights = jnp.ones((1, tokens + 2)).at[0, 1:tokens].set(1.0)
    rewards = jnp.zeros((1, tokens + 2)).at[0, -1].set(1.0)
    values = jnp.concatenate([jnp.full((1, tokens), 0.3), jnp.full((1, 2), 0.5)], axis=1)
    segment_ids = one_sequence(tokens + 2)
    units = turn_units(segment_ids, turns)
    advantages = gae(rewards, values, weights, segment_ids, gamma=0.9, lam=0.8, units=units)
    discounted = reward_to_go(rewards, weights, segment_ids, gamma=0.9, units=units)
    return advantages[0, 0], advantages[0, tokens - 1], discounted[0, 0]

  expected = (0.9 * 0.5 - 0.3) + 0.9 * 0.8 * (1 - 0.5)
  for tokens in (1, 4):
    np.testing.assert_allclose(first_turn(tokens), [expected, expected, 0.9], atol=1e-6)


def test_early_turns_see_the_reward_behind_an_observation():
  """The trap of returns multiplied by the mask at every step: earlier turns would get 0."""
  ours = reward_to_go(row(0, 0, 0, 0, 1), row(1, 1, 0, 1, 1), one_sequence(5), gamma=0.5)
  np.testing.assert_allclose(ours[0], [0.125, 0.25, 0, 0.5, 1])


def test_nothing_crosses_from_one_sequence_to_the_next():
  segment_ids = jnp.array([[1, 1, 2, 2]])
  ours = reward_to_go(row(0, 0, 0, 7), row(1, 1, 1, 1), segment_ids, gamma=1.0)
  np.testing.assert_allclose(ours, row(0, 0, 7, 7))


def test_length_adaptive_lambda_of_vapo():
  ours = returns.length_adaptive_lambda(jnp.array([100.0, 1000.0, 10000.0, 1.0]), 0.05)
  np.testing.assert_allclose(ours, [0.8, 0.98, 0.998, 0.0], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 50), st.floats(-9, 9))
def test_whitened_values_have_mean_0_and_variance_1_on_the_mask(seed, scale, shift):
  random = np.random.default_rng(seed)
  weights = jnp.asarray((random.random((2, 20)) < 0.6).astype(np.float32)).at[0, :2].set(1)
  values = jnp.asarray(scale * random.normal(size=(2, 20)) + shift, jnp.float32)
  white = np.asarray(returns.whiten(values, weights))
  inside = white[np.asarray(weights) > 0]
  np.testing.assert_allclose(inside.mean(), 0, atol=1e-4)
  np.testing.assert_allclose(inside.var(ddof=1), 1, atol=1e-3)
  assert not white[np.asarray(weights) == 0].any()


@pytest.mark.parametrize("weights", [[0, 0, 0], [1, 0, 0], [1, 1, 1]])
def test_whitening_without_spread_gives_zeros(weights):
  white = returns.whiten(row(0.1, 0.1, 0.1), row(*weights))
  np.testing.assert_array_equal(white, row(0, 0, 0))
