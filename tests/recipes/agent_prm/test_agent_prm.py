"""AgentPRM's labels and loss, by hand."""

import jax.numpy as jnp
import numpy as np

from agentjax.recipes.agent_prm.labels import promise_and_progress
from agentjax.recipes.agent_prm.loss import promise_progress_loss


def labels(values, rewards, gamma=1.0, gae_lambda=0.95):
  """Of one sequence whose every token ends a turn."""
  one = jnp.ones((1, len(values)), int)
  values, rewards = (jnp.array([x], jnp.float32) for x in (values, rewards))
  found = promise_and_progress(values, rewards, one > 0, one, gamma=gamma, gae_lambda=gae_lambda)
  return [np.asarray(x[0]) for x in found]


def test_promise_and_progress_by_hand():
  """V = .5, .6, rewards 0, 1, gamma 1, lambda .5: d = .1, .4, A = .1 + .5 * .4, .4."""
  promise, progress = labels([0.5, 0.6], [0.0, 1.0], gae_lambda=0.5)
  np.testing.assert_allclose(progress, [0.3, 0.4], rtol=1e-5)
  np.testing.assert_allclose(promise, [0.8, 1.0], rtol=1e-5)


def test_with_lambda_one_the_promise_is_the_return_whatever_the_values():
  values, rewards = np.random.default_rng(0).normal(size=(2, 6))
  promise, progress = labels(values, rewards, gamma=0.9, gae_lambda=1.0)
  returns = [sum(0.9**k * r for k, r in enumerate(rewards[t:])) for t in range(6)]
  np.testing.assert_allclose(promise, returns, rtol=1e-4)
  one_step, _ = labels(values, rewards, gamma=0.9, gae_lambda=0.0)
  np.testing.assert_allclose(one_step, rewards + 0.9 * np.append(values[1:], 0), rtol=1e-4)


def test_sequences_of_a_row_and_tokens_inside_turns_do_not_mix():
  """Two sequences in one row, turns of several tokens, padding at the end."""
  segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]])
  ends = jnp.array([[0, 1, 0, 1, 0, 0, 1, 0]]) > 0
  values = jnp.where(ends, jnp.array([[9, 0.5, 9, 0.6, 9, 9, 0.25, 9]]), 9.0)
  rewards = jnp.array([[0, 0, 0, 1.0, 0, 0, 0.5, 0]])
  promise, progress = promise_and_progress(
    values, rewards, ends, segments, gamma=1.0, gae_lambda=0.5
  )
  np.testing.assert_allclose(progress, [[0, 0.3, 0, 0.4, 0, 0, 0.25, 0]], rtol=1e-5)
  np.testing.assert_allclose(promise, [[0, 0.8, 0, 1.0, 0, 0, 0.5, 0]], rtol=1e-5)


def test_the_loss_by_hand():
  loss = promise_progress_loss(
    jnp.array([0.5, 0.75]),
    jnp.array([0.0, 0.5]),
    jnp.array([0.75, 0.75]),
    jnp.array([0.5, 0.5]),
    beta=2.0,
  )
  np.testing.assert_allclose(loss, [0.0625, 2 * 0.0625])
