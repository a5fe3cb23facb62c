"""KL estimators: values and, what matters for a loss, exact expected gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives.kl import kl_estimate

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


def test_an_unknown_estimator_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match="k3_plus"):
    kl_estimate(LOGITS, REFERENCE, "k4")  # type: ignore[arg-type]
