import numpy as np
import pytest

from agentjax.recipes.prime.rewards import log_ratio_rewards


def test_log_ratios_become_rewards_of_the_turns_that_were_drawn():
  steps = np.array([-1, -1, -1, 0, 0, -1, 1])
  policy = np.array([9.0, 9, 9, -1.0, -0.5, 9, -2.0])
  reference = np.array([0.0, 0, 0, -1.5, -2.0, 0, -1.0])
  tokens = log_ratio_rewards(policy, reference, beta=0.5)
  sums = [tokens[steps == step].sum() for step in (0, 1)]
  np.testing.assert_allclose(sums, [0.5 * (0.5 + 1.5), 0.5 * -1.0])
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
