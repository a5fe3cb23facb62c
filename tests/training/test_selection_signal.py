"""What selection does to a step's gradient: how much of it points where rewards are to be had.

A linear policy of one token a turn, with fewer features than prompts, so that prompts disturb one
another. Two prompts of eight have a right token; the others pay nothing, or a coin.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.training.selectors import SelectionConfig, keep_groups
from agentjax.trajectory.batch import Batch

PROMPTS, SIGNAL, SIZE, TOKENS, DRAWS = 8, 2, 8, 4, 400
GROUPS = np.repeat(np.arange(PROMPTS), SIZE)
_RANDOM = np.random.default_rng(0)
FEATURES = _RANDOM.normal(size=(PROMPTS, 5)).astype(np.float32)
WEIGHTS = 0.7 * _RANDOM.normal(size=(5, TOKENS)).astype(np.float32)
RIGHT = 1

ALL = SelectionConfig()
SPREAD = SelectionConfig(rule="top_p", share=1.0)  # drops groups without spread and no other
BEST = SelectionConfig(rule="top_k", share=SIGNAL / PROMPTS, keep_zeros=True)


def log_policy(weights):
  return jax.nn.log_softmax(jnp.asarray(FEATURES) @ weights)[GROUPS]


@functools.partial(jax.jit, static_argnames="strength")
@functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
def ascents(tokens, rewards, kept, strength):
  """The direction that a step on the kept episodes goes, of each draw."""
  config = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(entropy_coefficient=strength))
  column = jnp.ones((PROMPTS * SIZE, 1))
  chosen = functools.partial(jnp.take_along_axis, indices=tokens[:, None], axis=1)
  number = jnp.arange(PROMPTS * SIZE, dtype=jnp.int32)
  batch = Batch(
    token_ids=tokens[:, None],
    segment_ids=number[:, None] + 1,
    positions=0 * number[:, None],
    weights=column,
    behaviour_log_probs=chosen(log_policy(WEIGHTS)),
    entropies=0 * column,
    versions=0 * number[:, None],
    turns=0 * number[:, None],
    rewards=rewards,
    valid=kept,
    groups=jnp.asarray(GROUPS),
  )
  prepared, _ = prepare(batch, config)

  def loss(weights):
    every = log_policy(weights)
    entropies = -jnp.sum(jnp.exp(every) * every, axis=1, keepdims=True)
    return policy_objective(config)(prepared.with_scores(chosen(every), entropies))[0]

  return -jax.grad(loss)(jnp.asarray(WEIGHTS)).ravel()


def sample(noise):
  """Tokens and rewards [draws, episodes]; ``noise`` is what a coin pays beside the two prompts."""
  random = np.random.default_rng(1)
  every = np.exp(np.asarray(log_policy(WEIGHTS), np.float64))
  below = random.random((DRAWS, len(GROUPS), 1))
  tokens = np.minimum((below > every.cumsum(1)).sum(-1), TOKENS - 1).astype(np.int32)
  coins = random.random(tokens.shape) < 0.5
  rewards = np.where(GROUPS < SIGNAL, tokens == RIGHT, noise * coins)
  return tokens, rewards.astype(np.float32)


def steps(selection, *, strength=0.0, noise=0.0):
  """float64 [draws, parameters]: what the steps on the selected groups would do."""
  tokens, rewards = sample(noise)
  scores = rewards.reshape(DRAWS, PROMPTS, SIZE).std(axis=2, ddof=1)
  kept = np.stack([keep_groups(s, selection) for s in scores])
  found = np.asarray(ascents(tokens, rewards, np.repeat(kept, SIZE, 1), strength), np.float64)
  factors = [selection.loss_factor(k.sum(), PROMPTS) for k in kept]
  return found * np.array(factors)[:, None]


def signal_to_noise(found):
  """(mean step along the true gradient)^2 / mean square of all that is not that mean."""

  def success(weights):
    return jnp.sum(jnp.exp(log_policy(weights))[GROUPS < SIGNAL, RIGHT])

  true = np.asarray(jax.grad(success)(jnp.asarray(WEIGHTS)), np.float64).ravel()
  true /= np.linalg.norm(true)
  along = (found @ true).mean()
  assert along > 0
  return along**2 / np.mean(np.sum((found - along * true) ** 2, axis=1))


def test_silent_groups_add_nothing_but_what_does_not_look_at_rewards():
  shrunk = SelectionConfig(rule="top_p", share=1.0, rescale="linear")
  np.testing.assert_allclose(steps(shrunk), steps(ALL), rtol=1e-4, atol=1e-6)
  assert not np.allclose(steps(shrunk, strength=0.1), steps(ALL, strength=0.1), atol=1e-3)


@pytest.mark.parametrize(
  "selection, strength, noise, gain",
  [
    (SPREAD, 0.3, 0.0, 2.0),  # hopeless groups bring the bonus
    (BEST, 0.0, 0.1, 2.0),  # groups of small noise, which normalised advantages make large
    (BEST, 0.3, 0.1, 1.5),
  ],
)
def test_the_gradient_points_at_rewards_where_the_other_groups_are_gone(
  selection, strength, noise, gain
):
  of_all = signal_to_noise(steps(ALL, strength=strength, noise=noise))
  selected = signal_to_noise(steps(selection, strength=strength, noise=noise))
  assert selected > gain * of_all


def test_spread_that_is_chance_cannot_be_told_from_spread_that_is_not():
  of_all, selected = (signal_to_noise(steps(s, noise=1.0)) for s in (ALL, BEST))
  assert selected < of_all
