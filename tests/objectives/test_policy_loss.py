"""The policy loss: golden numbers, finite differences, and what each clip does to a gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.objectives.aggregation import token_coefficients
from agentjax.objectives.policy_loss import (
  PolicyLossConfig,
  clipped_surrogate,
  covariance_selection,
  policy_loss,
)

# Two sequences in one row, with padding between and after them.
SEGMENTS = jnp.array([[1, 1, 1, 0, 2, 2, 0]])
WEIGHTS = (SEGMENTS > 0).astype(jnp.float32)
NOW = jnp.array([[-0.5, -1.0, -2.0, 0.0, -0.3, -0.7, 0.0]])
OLD = jnp.array([[-0.9, -1.0, -1.5, 0.0, -0.2, -1.2, 0.0]])
ADVANTAGES = jnp.array([[1.0, 1.0, 1.0, 0.0, -0.5, -0.5, 0.0]])
SEQUENCE_MEAN = "sequence_mean_token_mean"


@functools.partial(jax.jit, static_argnums=0)
def total(config, now=NOW, old=OLD, advantages=ADVANTAGES, weights=WEIGHTS, **kwargs):
  loss = policy_loss(now, old, advantages, weights, SEGMENTS, config, **kwargs)
  coefficients = token_coefficients(
    weights, SEGMENTS, 2, mode=config.aggregation, constant=config.aggregation_constant
  )
  return jnp.sum(coefficients * loss.per_token)


@pytest.mark.parametrize(
  "config, expected",
  [
    (PolicyLossConfig(clip_high=0.28), -0.32195),
    (PolicyLossConfig(gradient_form="score", clip="ppo", clip_high=0.28), 0.531255),
    (
      PolicyLossConfig(
        ratio_level="sequence", clip_low=3e-4, clip_high=4e-4, aggregation=SEQUENCE_MEAN
      ),
      -0.178257,
    ),
    (PolicyLossConfig(clip="sapo", aggregation=SEQUENCE_MEAN), -0.473214),
  ],
)
def test_golden_losses(config, expected):
  config.validate()
  np.testing.assert_allclose(total(config), expected, atol=2e-6)


def test_golden_sequence_ratios():
  loss = policy_loss(
    NOW, OLD, ADVANTAGES, WEIGHTS, SEGMENTS, PolicyLossConfig(ratio_level="sequence")
  )
  np.testing.assert_allclose(loss.ratio[0, [0, 2, 4]], [0.967216, 0.967216, 1.221403], rtol=1e-6)


DIFFERENTIABLE = {
  "none": PolicyLossConfig(clip="none"),
  "ppo": PolicyLossConfig(clip_high=0.28, aggregation=SEQUENCE_MEAN),
  "dual": PolicyLossConfig(clip_high=0.28, dual_clip=2.0),
  "sapo": PolicyLossConfig(clip="sapo"),
  "gmpo": PolicyLossConfig(ratio_level="sequence", clip="gmpo", aggregation=SEQUENCE_MEAN),
  "gspo": PolicyLossConfig(ratio_level="sequence", clip="none", aggregation=SEQUENCE_MEAN),
  "gspo_clipped": PolicyLossConfig(ratio_level="sequence", aggregation=SEQUENCE_MEAN),
  "reinforce": PolicyLossConfig(gradient_form="score", clip="unit"),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_is_that_of_the_value_by_finite_differences(name, x64):
  """For losses whose weights are not held constant; in float64, away from the kinks."""
  random = np.random.default_rng(3)
  now, old = (jnp.asarray(np.array(x, np.float64)) for x in (NOW, OLD))
  now = now + jnp.asarray(random.normal(0, 0.05, now.shape))
  args = dict(old=old, advantages=ADVANTAGES.astype(float), weights=WEIGHTS.astype(float))

  def loss(x):
    return total(DIFFERENTIABLE[name], now=x, **args)

  gradient = jax.grad(loss)(now)
  step = 1e-6
  for t in range(now.shape[1]):
    change = jnp.zeros_like(now).at[0, t].set(step)
    slope = (loss(now + change) - loss(now - change)) / (2 * step)
    np.testing.assert_allclose(gradient[0, t], slope, atol=1e-8)


@functools.partial(jax.jit, static_argnums=0)
def slope(config, ratio, advantage, bonus=0.0):
  """d loss / d log pi of one token at a given ratio."""
  segments, one = jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1))

  def loss(log_prob):
    result = policy_loss(
      log_prob[None, None],
      jnp.full((1, 1), -2.0),
      advantage * one,
      one,
      segments,
      config,
      clip_high_bonus=bonus,
    )
    return result.per_token[0, 0]

  return jax.grad(loss)(jnp.log(ratio) - 2.0)


@pytest.mark.parametrize(
  "config, cases",
  [
    # (ratio, advantage, gradient). Pessimistic: stops good news above, bad news below.
    (
      PolicyLossConfig(),
      [(1.3, 1, 0), (0.7, 1, -0.7), (1.3, -1, 1.3), (0.7, -1, 0), (9, -1, 9)],
    ),
    (PolicyLossConfig(clip_high=0.28), [(1.25, 1, -1.25), (1.3, 1, 0)]),
    (PolicyLossConfig(dual_clip=3.0), [(9, -1, 0), (2, -1, 2), (9, 1, 0), (0.7, 1, -0.7)]),
    (PolicyLossConfig(clip="mask"), [(1.3, 1, 0), (0.7, 1, -0.7), (0.7, -1, 0), (9, -1, 9)]),
    # On the score function a clip bounds the weight and never the sample.
    (
      PolicyLossConfig(gradient_form="score", clip="ppo"),
      [(1.3, 1, -1.2), (0.7, 1, -0.8), (9, -1, 1.2), (0.7, -1, 0.8)],
    ),
    (
      PolicyLossConfig(gradient_form="score", clip="truncate", clip_high=0.0),
      [(1.3, 1, -1), (0.7, 1, -0.7), (9, -1, 1)],
    ),
    (
      PolicyLossConfig(
        gradient_form="score", clip="truncate", clip_high=0.0, positive_weight_one=True
      ),
      [(0.1, 1, -1), (9, 1, -1), (0.1, -1, 0.1), (9, -1, 1)],
    ),
    (
      PolicyLossConfig(gradient_form="score", clip="mask"),
      [(1.3, 1, 0), (0.7, 1, -0.7), (0.7, -1, 0), (9, -1, 9)],
    ),
    (PolicyLossConfig(gradient_form="score", clip="unit"), [(9, 1, -1), (0.1, -1, 1)]),
    (PolicyLossConfig(gradient_form="score", clip="none"), [(9, 1, -9), (0.1, -1, 0.1)]),
    # 4 s (1 - s) r at s = sigmoid(tau (r - 1)): full at r = 1, fading on both sides.
    (PolicyLossConfig(clip="sapo"), [(1, 1, -1), (3, 1, -4 * 0.880797 * 0.119203 * 3)]),
  ],
)
def test_what_a_clip_leaves_of_a_gradient(config, cases):
  config.validate()
  for ratio, advantage, expected in cases:
    got = slope(config, float(ratio), float(advantage))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_clip_high_bonus_opens_the_upper_bound_only():
  assert slope(PolicyLossConfig(), 1.25, 1.0, bonus=0.1) != 0
  assert slope(PolicyLossConfig(), 0.75, -1.0, bonus=0.1) == 0


def test_on_policy_every_form_has_the_policy_gradient():
  """At ratio 1 all published losses agree: minus A on every token."""
  for config in (
    *DIFFERENTIABLE.values(),
    *(
      PolicyLossConfig(gradient_form="score", clip=clip)
      for clip in ("none", "ppo", "truncate", "mask", "unit")
    ),
  ):
    config = dataclasses.replace(config, aggregation="token_mean", aggregation_constant=None)
    gradient = jax.grad(lambda now, config=config: total(config, now=now, old=NOW))(NOW)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 5, atol=1e-6)


def test_sequence_ratio_is_shared_while_advantages_may_differ_inside():
  """GSPO-token: the weight is the sequence's, the credit the token's."""
  advantages = jnp.array([[1.0, 2.0, -1.0, 0.0, 1.0, 1.0, 0.0]])
  config = PolicyLossConfig(ratio_level="sequence", clip="none")
  gradient = jax.grad(lambda now: total(config, now=now, advantages=advantages))(NOW)
  np.testing.assert_allclose(gradient[0, :3], -0.967216 * np.array([1.0, 2.0, -1.0]) / 5, rtol=1e-5)


def test_turn_ratio_is_the_geometric_mean_over_sampled_tokens_of_the_chunk():
  turns = jnp.array([[0, 0, 1, -1, 0, 0, -1]])
  weights = WEIGHTS.at[0, 1].set(0)  # an observation inside the first chunk
  config = PolicyLossConfig(ratio_level="turn", clip="none")
  loss = policy_loss(NOW, OLD, ADVANTAGES, weights, SEGMENTS, config, turns=turns)
  expected = np.exp([0.4, 0.0, -0.5, 0.0, 0.2, 0.2, 0.0])
  np.testing.assert_allclose(loss.ratio[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_garbage_on_masked_tokens_and_padding_never_reaches_loss_or_gradient(name):
  config, outside = DIFFERENTIABLE[name], WEIGHTS == 0
  for poison in (jnp.nan, jnp.inf, 1e30):
    bad = [jnp.where(outside, poison, x) for x in (NOW, OLD, ADVANTAGES)]
    value, gradient = jax.value_and_grad(lambda now, bad=bad: total(config, now, bad[1], bad[2]))(
      bad[0]
    )
    np.testing.assert_allclose(value, total(config), rtol=1e-6)
    assert np.isfinite(gradient).all()
    assert not gradient[outside].any()


@settings(max_examples=60, deadline=None)
@given(st.floats(-60, 60), st.floats(-5, 5), st.sampled_from([None, 1.5, 3.0]), st.floats(0, 0.5))
def test_clipped_surrogate_is_finite_and_bounded_as_promised(log_ratio, advantage, dual, high):
  loss = clipped_surrogate(
    jnp.float32(log_ratio), jnp.float32(advantage), 0.2, high, dual_clip=dual
  )
  value, gain = float(loss.per_token), -float(loss.per_token)
  assert np.isfinite(value)
  if advantage > 0:
    assert gain <= (1 + high) * advantage * (1 + 1e-5)
  if advantage < 0 and dual is not None and dual > 1 + high:
    assert gain >= dual * advantage * (1 + 1e-5)


def test_covariance_selection_takes_the_largest_terms_of_weighted_tokens():
  advantages = jnp.array([[1.0, 1.0, 1.0, 99.0, -1.0, -1.0, 99.0]])
  log_probs = jnp.array([[-0.1, -3.0, -2.0, 50.0, -0.2, -4.0, 50.0]])
  terms = np.where(
    WEIGHTS > 0, (advantages - 0.2) * (log_probs - float(log_probs[WEIGHTS > 0].mean())), -np.inf
  )
  for fraction, number in [(0.01, 1), (0.4, 2), (1.0, 5)]:
    chosen = np.asarray(covariance_selection(log_probs, advantages, WEIGHTS, fraction))
    assert chosen.sum() == number
    best = np.argsort(-terms.ravel())[:number]
    assert set(np.flatnonzero(chosen.ravel())) == set(best.tolist())


@pytest.mark.parametrize(
  "changes, named",
  [
    ({"clip_low": -0.1}, "clip_low"),
    ({"clip_low": 1.5}, "clip_low"),
    ({"clip": "truncate"}, "gradient_form='ratio'"),
    ({"clip": "unit"}, "gradient_form='ratio'"),
    ({"clip": "sapo", "gradient_form": "score"}, "gradient_form='score'"),
    ({"clip": "gmpo"}, "ratio_level='token'"),
    ({"positive_weight_one": True}, "positive_weight_one"),
    ({"gradient_form": "score", "clip": "mask", "positive_weight_one": True}, "mask"),
    ({"dual_clip": 1.1}, "dual_clip"),
    ({"dual_clip": 3.0, "clip": "none"}, "dual_clip"),
    ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_in_reward"),
    ({"aggregation": "constant"}, "aggregation_constant"),
    ({"aggregation_constant": 5.0}, "aggregation"),
    ({"aggregation": "constant", "aggregation_constant": 0.0}, "aggregation_constant"),
    ({"sapo_temperature_negative": 0.0}, "sapo_temperature_negative"),
    ({"covariance_fraction": 0.0}, "covariance_fraction"),
    ({"ratio_level": "word"}, "'token', 'turn', 'sequence'"),
  ],
)
def test_impossible_settings_name_their_field(changes, named):
  with pytest.raises(ConfigError) as error:
    dataclasses.replace(PolicyLossConfig(), **changes).validate("objective.policy_loss")
  assert named in str(error.value)
  assert "objective.policy_loss." in str(error.value)
