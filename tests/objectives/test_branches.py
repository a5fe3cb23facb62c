"""Tokens that several branches share: ARPO's soft and hard advantages (2507.19849)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.recipes.credit import SharedTerm
from agentjax.trajectory.batch import Batch

# Four episodes of one token that three of them share, and a token each of their own. With rewards
# 1, 0, 0, 1 the advantages are +-0.999998: the deviation is 0.5 and epsilon 1e-6.
REWARDS = (1.0, 0.0, 0.0, 1.0)
SHARED, OWN = 1, 2  # columns; column 0 is the prompt, whose weight is 0


def batch(valid=(True, True, True, True)):
  rows, time = 4, 3
  weights = np.ones((rows, time), np.float32)
  weights[:, 0] = 0
  branches = np.array([[1, 2, 3], [1, 2, 4], [1, 2, 5], [6, 7, 8]], np.int32)
  zeros = np.zeros((rows, time), np.float32)
  return Batch(
    token_ids=np.ones((rows, time), np.int32),
    segment_ids=np.repeat(np.arange(1, 5, dtype=np.int32), 3).reshape(rows, time),
    positions=np.tile(np.arange(time, dtype=np.int32), (rows, 1)),
    weights=weights,
    behaviour_log_probs=zeros - 1.0,
    entropies=zeros,
    versions=zeros.astype(np.int32),
    turns=zeros.astype(np.int32),
    rewards=np.array(REWARDS, np.float32),
    valid=np.array(valid),
    groups=np.zeros(4, np.int32),
    columns={"branches": branches},
  )


def coefficients(branches, ratio, data=None):
  """Gradient by the log-prob of each token, as a sum over tokens and not a mean."""
  config = ObjectiveConfig(
    AdvantageConfig(ddof=0, terms=(SharedTerm(),) if branches == "hard" else ()),
    PolicyLossConfig(clip_high=0.2, aggregation="constant", aggregation_constant=1.0),
  )
  data = batch() if data is None else data
  prepared, _ = prepare(data, config)
  objective = policy_objective(config)

  def loss(log_probs):
    return objective(prepared.with_scores(log_probs, jnp.zeros_like(log_probs)))[0]

  gradient = -jax.grad(loss)(jnp.asarray(data.behaviour_log_probs) + jnp.log(ratio))
  return np.asarray(gradient) * (1.0 if data.num_sequences == 0 else _scale(prepared))


def _scale(prepared):
  """Undoes the aggregation: coefficients are all alike on weighted tokens."""
  values = np.asarray(prepared.coefficients)
  return 1.0 / values[values > 0][0]


@pytest.mark.slow
def test_on_policy_both_give_the_shared_token_one_gradient():
  for branches in ("soft", "hard"):
    gradient = coefficients(branches, 1.0)
    np.testing.assert_allclose(gradient[:3, SHARED].sum(), -0.999998, atol=1e-6)
    np.testing.assert_allclose(gradient[:, OWN], [0.999998, -0.999998, -0.999998, 0.999998], 1e-6)
  assert np.unique(coefficients("hard", 1.0)[:3, SHARED]).size == 1
  assert np.unique(coefficients("soft", 1.0)[:3, SHARED]).size == 2


@pytest.mark.parametrize(("branches", "expected"), [("soft", -2.8), ("hard", -1.4)])
def test_where_the_ratio_is_clipped_they_differ(branches, expected):
  assert coefficients(branches, 1.4)[:3, SHARED].sum() == pytest.approx(expected, abs=1e-5)


def test_a_masked_branch_does_not_count_in_the_mean():
  gradient = coefficients("hard", 1.0, batch(valid=(True, True, False, True)))
  assert not gradient[2].any()
  # Rewards 1, 0, 1 of the valid ones: the mean of the two branches left.
  own = gradient[[0, 1], OWN]
  np.testing.assert_allclose(gradient[:2, SHARED], own.mean(), atol=1e-6)


def test_without_branches_hard_is_soft():
  plain = batch().without("branches")
  np.testing.assert_array_equal(coefficients("hard", 1.4, plain), coefficients("soft", 1.4, plain))


def test_hard_needs_one_advantage_a_sequence():
  credit = AdvantageConfig(credit="reward_to_go", gamma=0.9, terms=(SharedTerm(),))
  with pytest.raises(ConfigError, match=r"advantage\.credit='reward_to_go'; allowed: 'broadcast'"):
    credit.terms[0].check_run(None, ObjectiveConfig(credit), "objective")
