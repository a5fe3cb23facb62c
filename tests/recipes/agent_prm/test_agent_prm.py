"""AgentPRM's labels and loss, by hand."""

import jax.numpy as jnp
import numpy as np

from agentjax.recipes.agent_prm.labels import promise_and_progress
from agentjax.recipes.agent_prm.loss import promise_progress_loss


def test_promise_and_progress_by_hand():
  """V = .5, .6, rewards 0, 1, gamma 1, lambda .5: d = .1, .4, A = .1 + .5 * .4, .4."""
  promise, progress = promise_and_progress([0.5, 0.6], [0.0, 1.0], gae_lambda=0.5)
  np.testing.assert_allclose(progress, [0.3, 0.4])
  np.testing.assert_allclose(promise, [0.8, 1.0])


def test_with_lambda_one_the_promise_is_the_return_whatever_the_values():
  values, rewards = np.random.default_rng(0).normal(size=(2, 6))
  promise, progress = promise_and_progress(values, rewards, gamma=0.9, gae_lambda=1.0)
  returns = [sum(0.9**k * r for k, r in enumerate(rewards[t:])) for t in range(6)]
  np.testing.assert_allclose(promise, returns)
  one_step, _ = promise_and_progress(values, rewards, gamma=0.9, gae_lambda=0.0)
  np.testing.assert_allclose(one_step, rewards + 0.9 * np.append(values[1:], 0))


def test_promise_and_progress_golden():
  loss = promise_progress_loss(
    jnp.array([0.5, 0.75]),
    jnp.array([0.0, 0.5]),
    jnp.array([0.75, 0.75]),
    jnp.array([0.5, 0.5]),
    beta=2.0,
  )
  np.testing.assert_allclose(loss, [0.0625, 2 * 0.0625])
