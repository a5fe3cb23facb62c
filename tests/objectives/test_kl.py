"""KL estimators: values and, what matters for a loss, exact expected gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.kl import kl_estimate
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preparation import prepare

LOGITS = jnp.array([0.3, -0.7, 1.1, 0.2])
REFERENCE = jax.nn.log_softmax(jnp.array([0.9, 0.1, -0.4, 0.5]))


def expectation(function):
  """Exact mean over tokens drawn from the softmax of LOGITS, the draw itself without gradient."""
  probabilities = jax.nn.softmax(LOGITS)
  return lambda logits: jnp.sum(probabilities * function(jax.nn.log_softmax(logits)))


def reverse_kl(logits):
  log_probs = jax.nn.log_softmax(logits)
  return jnp.sum(jnp.exp(log_probs) * (log_probs - REFERENCE))


def forward_kl(logits):
  return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - jax.nn.log_softmax(logits)))


@pytest.mark.parametrize(
  "estimator, target",
  [("k2", reverse_kl), ("k3_plus", reverse_kl), ("k3", forward_kl), ("k1", None)],
)
def test_expected_gradient_is_the_one_the_table_says(estimator, target):
  mean = expectation(lambda log_probs: kl_estimate(log_probs, REFERENCE, estimator))
  expected = jnp.zeros(4) if target is None else jax.grad(target)(LOGITS)
  np.testing.assert_allclose(jax.grad(mean)(LOGITS), expected, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_plus"])
def test_unbiased_estimators_have_the_kl_as_mean(estimator):
  mean = expectation(lambda log_probs: kl_estimate(log_probs, REFERENCE, estimator))
  np.testing.assert_allclose(mean(LOGITS), reverse_kl(LOGITS), atol=1e-6)


@pytest.mark.parametrize("estimator, expected", [("k1", -0.12), ("k2", 0.106), ("k3", 0.149337)])
def test_golden_values(estimator, expected):
  log_probs = jnp.array([-0.5, -1.0, -2.0, -0.3, -0.7])
  reference = jnp.array([-0.6, -1.1, -1.0, -0.3, -0.9])
  np.testing.assert_allclose(
    kl_estimate(log_probs, reference, estimator).mean(), expected, atol=1e-6
  )


@pytest.mark.parametrize("estimator", ["k3", "k3_plus"])
def test_a_far_reference_stays_finite_in_value_and_gradient(estimator):
  log_probs, reference = jnp.array([-200.0, -1.0]), jnp.array([-1.0, -200.0])
  value = kl_estimate(log_probs, reference, estimator)
  gradient = jax.grad(lambda x: kl_estimate(x, reference, estimator).sum())(log_probs)
  np.testing.assert_allclose(value, [10.0, 10.0])
  assert np.isfinite(gradient).all()


def mean_square(logits):
  log_probs = jax.nn.log_softmax(logits)
  return jnp.sum(jnp.exp(log_probs) * 0.5 * jnp.square(log_probs - REFERENCE))


@pytest.mark.parametrize(
  "estimator, target", [("k1", reverse_kl), ("k3", reverse_kl), ("k2", mean_square)]
)
@pytest.mark.parametrize("sampled_by", ["current", "other"])
def test_a_differentiated_weight_gives_the_gradient_of_the_mean_itself(
  estimator, target, sampled_by, x64
):
  """Expectation over tokens of a policy that is not differentiated, exactly."""
  logits = jnp.float64(LOGITS)
  moved = jnp.array([0.4, -0.3, 0.2, 0.0]) if sampled_by == "other" else 0
  sampler = jax.nn.log_softmax(logits + moved)

  def weighted(z):
    log_probs = jax.nn.log_softmax(z)
    terms = kl_estimate(log_probs, REFERENCE, estimator, log_probs - sampler)
    return jnp.sum(jnp.exp(sampler) * terms)

  # The probabilities of the reference sum to 1 in float32.
  np.testing.assert_allclose(weighted(logits), target(logits), atol=1e-6)
  np.testing.assert_allclose(jax.grad(weighted)(logits), jax.grad(target)(logits), atol=1e-6)


def test_weighted_golden_numbers_and_finite_differences(x64):
  """r (e^d - d - 1), r = e^(log pi - log pi_sampled); its slope is -r d."""
  log_probs, reference = jnp.array([-0.5, -1.0, -2.0]), jnp.array([-0.6, -1.1, -1.0])
  sampler = jnp.array([-0.7, -1.0, -1.5])
  ratio, d = np.exp([0.2, 0.0, -0.5]), np.array([-0.1, -0.1, 1.0])
  np.testing.assert_allclose(
    kl_estimate(log_probs, reference, "k3", log_probs - sampler),
    [0.0059084, 0.0048374, 0.4356603],
    atol=1e-6,
  )

  def total(x):
    return kl_estimate(x, reference, "k3", x - sampler).sum()

  slope = jax.grad(total)(log_probs)
  np.testing.assert_allclose(slope, ratio * (-d), atol=1e-12)
  step = 1e-6
  rises = [total(log_probs + step * e) - total(log_probs - step * e) for e in np.eye(3)]
  np.testing.assert_allclose(slope, np.array(rises) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("weight", ["none", "current", "behaviour"])
def test_a_config_names_the_weight(packer, weight):
  """No advantage: the gradient is that of .5 times a mean of two estimates."""
  now, d = np.array([[-1.0, -2.0]]), np.array([[-0.5, 0.75]])
  sampler = now - np.array([[0.3, -0.4]])
  pack = packer(1, 2, per_row=1, gap=0)
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none"),
    PolicyLossConfig(kl_coefficient=0.5, kl_weight=weight),
  )
  config.validate()
  batch = pack.batch(np.ones((1, 2)), sampler, np.zeros(1))
  prepared, _ = prepare(batch, config, reference_log_probs=pack.pack(now + d))
  objective = policy_objective(config)

  def loss(x):
    return objective(prepared.with_scores(x, jnp.zeros_like(x)))[0]

  found = jax.grad(loss)(pack.pack(now))
  per_token = {
    "none": 1 - np.exp(d),
    "current": -d,
    "behaviour": -d * np.exp(now - sampler),
  }[weight]
  np.testing.assert_allclose(found, 0.25 * per_token, atol=1e-6)


@pytest.mark.parametrize(
  "changes, named",
  [
    (dict(kl_weight="current"), "kl_weight"),
    (dict(kl_weight="current", kl_coefficient=0.1, kl_estimator="k3_plus"), "kl_estimator"),
    (dict(kl_coefficient=0.1, kl_estimator="k1"), "kl_estimator"),
  ],
)
def test_weights_that_do_nothing_or_cannot_be_are_refused(changes, named):
  with pytest.raises(ConfigError, match=f"policy_loss.{named}"):
    PolicyLossConfig(**changes).validate()
  PolicyLossConfig(kl_weight="current", kl_coefficient=0.1, kl_estimator="k1").validate()


def test_an_unknown_estimator_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match="k3_plus"):
    kl_estimate(LOGITS, REFERENCE, "k4")  # type: ignore[arg-type]
