import numpy as np
import pytest

from agentjax.rewards.process import (
  log_ratio_rewards,
  monte_carlo_labels,
  monte_carlo_steps,
  promise_and_progress,
  sampled_steps,
  solution_score,
  step_sums,
)
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward
from tests.rewards.judging import run

NAN = float("nan")


def test_hard_labels_ask_for_one_success_and_soft_ones_for_the_share():
  played = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, NAN, 0], [NAN] * 4])
  np.testing.assert_array_equal(monte_carlo_labels(played, "hard"), [1, 0, 1, NAN])
  np.testing.assert_allclose(monte_carlo_labels(played, "soft"), [0.25, 0, 2 / 3, NAN])


def test_monte_carlo_finds_the_step_after_which_nothing_helps():
  keys = []

  async def complete(steps, key):
    keys.append(key)
    if key % 7 == 0:
      return None
    return "wrong" not in steps and key % 2 == 0

  played = run(monte_carlo_steps(["a", "b", "wrong", "c"], complete, completions=16, key=4))
  assert played.shape == (4, 16) and len(set(keys)) == 64
  assert list(monte_carlo_labels(played, "hard")) == [1, 1, 0, 0]
  soft = monte_carlo_labels(played, "soft")
  assert solution_score(soft) == 0 and solution_score(soft[:2]) > 0.2
  again = run(monte_carlo_steps(["a", "b", "wrong", "c"], complete, completions=16, key=4))
  np.testing.assert_array_equal(played, again)


def test_a_solution_is_as_good_as_its_weakest_step():
  steps = [0.5, 0.25, 1.0]
  for how, value in (("min", 0.25), ("product", 0.125), ("mean", 7 / 12), ("last", 1.0)):
    assert solution_score(steps, how) == pytest.approx(value)
  with pytest.raises(ValueError, match="at least one"):
    solution_score([])


def test_log_ratios_become_rewards_of_the_turns_that_were_drawn():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="made")
  builder.append("user", [1, 2, 3])
  builder.append_sampled([4, 5], np.full(2, -1.0), np.ones(2), 0)
  builder.append("tool", [6])
  builder.append_sampled([7], np.full(1, -1.0), np.ones(1), 0)
  steps = sampled_steps(builder.build(reward=Reward(1.0)))
  np.testing.assert_array_equal(steps, [-1, -1, -1, 0, 0, -1, 1])
  policy = np.array([9.0, 9, 9, -1.0, -0.5, 9, -2.0])
  reference = np.array([0.0, 0, 0, -1.5, -2.0, 0, -1.0])
  tokens = log_ratio_rewards(policy, reference, beta=0.5)
  np.testing.assert_allclose(step_sums(tokens, steps), [0.5 * (0.5 + 1.5), 0.5 * -1.0])
  with pytest.raises(ValueError, match="one shape"):
    log_ratio_rewards(policy, reference[:3], beta=1.0)


def test_progress_advantages_recover_the_optimal_advantage():
  """In a bandit with KL weight beta the best policy is pi_ref exp(r / beta) / Z."""
  rewards, beta = np.array([1.0, 0.0, -2.0]), 0.7
  reference = np.log([0.2, 0.5, 0.3])
  unscaled = reference + rewards / beta
  value = beta * np.log(np.exp(unscaled).sum())  # soft value of the only state
  best = unscaled - value / beta
  found = log_ratio_rewards(best, reference, beta=beta)
  np.testing.assert_allclose(found, rewards - value, atol=1e-12)


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
