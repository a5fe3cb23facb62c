"""Agentic GRPO: both advantages by hand, statistics a stage, and what plain GRPO cannot say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import (
  AdvantageConfig,
  ObjectiveConfig,
  PolicyLossConfig,
  policy_objective,
  sequence_advantages,
)
from agentjax.objectives.advantage_function import OwnAdvantage
from agentjax.recipes.agentic_grpo.stages import (
  StagedConfig,
  prepare_stages,
  stage_corrections,
  staged_advantages,
)
from tests.objectives.conftest import Packer

_EXACT = AdvantageConfig(epsilon=0.0)
_REWARDS = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.5, 1.0]])
_KNOWN, _GROUP = jnp.ones((3, 2), bool), jnp.zeros(3, jnp.int32)


def test_both_advantages_are_those_worked_out_by_hand():
  # Stage 1: mean 1/2, std 1/2. Stage 2: mean 2/3, std sqrt(1/3).
  immediate = staged_advantages(_REWARDS, _KNOWN, _GROUP, _EXACT)
  np.testing.assert_allclose(immediate[:, 0], [1, -1, 0], atol=1e-6)
  np.testing.assert_allclose(immediate[:, 1], [-1.154701, 0.577350, 0.577350], atol=1e-6)
  # d = (-1, 1, 1/2): mean 1/6, std sqrt(39/36). The last stage has d = 0.
  correction = stage_corrections(_REWARDS, _KNOWN, _GROUP, _EXACT)
  np.testing.assert_allclose(correction[:, 0], [-1.120897, 0.800641, 0.320256], atol=1e-6)
  np.testing.assert_array_equal(correction[:, 1], [0, 0, 0])


def test_every_stage_of_every_group_is_normalised_on_its_own():
  rng = np.random.default_rng(0)
  rewards = jnp.asarray(rng.standard_normal((8, 3)) * [1, 10, 100] + [0, 5, -5], jnp.float32)
  known = jnp.asarray(rng.random((8, 3)) < 0.9).at[:, 2].set(True).at[3, 2].set(False)
  groups = jnp.array([0, 1, 0, 1, 0, 1, 0, 1])
  for compute in (staged_advantages, stage_corrections):
    values = np.asarray(compute(rewards, known, groups, _EXACT))
    counted = np.asarray(known & known[:, 2:] if compute is stage_corrections else known)
    assert not values[~counted].any()
    for group in (0, 1):
      for stage in range(3 if compute is staged_advantages else 2):
        own = values[(np.asarray(groups) == group) & counted[:, stage], stage]
        np.testing.assert_allclose([own.mean(), own.std(ddof=1)], [0, 1], atol=1e-5)


def test_a_rollout_that_never_ended_changes_no_correction_of_the_others():
  rewards = jnp.concatenate([_REWARDS, jnp.array([[9.0, jnp.nan]])])
  known = jnp.concatenate([_KNOWN, jnp.array([[True, False]])])
  values = stage_corrections(rewards, known, jnp.zeros(4, jnp.int32), _EXACT)
  np.testing.assert_allclose(values[:3], stage_corrections(_REWARDS, _KNOWN, _GROUP, _EXACT))
  np.testing.assert_array_equal(values[3], [0, 0])


def _batch():
  """Three rollouts of two stages with two tokens each, and one token of a prompt before."""
  pack = Packer(3, 5)
  turns = np.tile([-1, 0, 0, 1, 1], (3, 1))
  weights = (turns >= 0).astype(np.float32)
  # Outcomes agree: plain GRPO has nothing to say of them.
  batch = pack.batch(weights, np.zeros((3, 5), np.float32), [1.0, 1.0, 1.0], turns=turns)
  return pack, batch


def test_a_stage_learns_at_once_where_outcomes_say_nothing():
  pack, batch = _batch()
  plain = sequence_advantages(batch.rewards, batch.valid, batch.groups, _EXACT)
  assert not np.any(plain)
  first = jnp.array([[True, False]] * 3)  # the second stage is not scored yet
  config = ObjectiveConfig(_EXACT)
  prepared, metrics = prepare_stages(batch, _REWARDS, first, batch.turns, config, "immediate")
  tokens = pack.unpack(prepared.advantages)
  np.testing.assert_allclose(tokens, [[0, 1, 1, 0, 0], [0, -1, -1, 0, 0], [0] * 5], atol=1e-6)
  np.testing.assert_array_equal(pack.unpack(prepared.weights)[0], [0, 1, 1, 0, 0])
  assert metrics["advantage/learning_share"] == pytest.approx(2 / 3)


def test_an_early_success_that_led_nowhere_is_taken_back_within_the_narrower_bound():
  pack, batch = _batch()
  narrower = StagedConfig(correction_clip_low=0.05, correction_clip_high=0.05)
  config = ObjectiveConfig(_EXACT)

  def slope(update, log_ratio):
    prepared, _ = prepare_stages(batch, _REWARDS, _KNOWN, batch.turns, config, update)
    objective = policy_objective(config if update == "immediate" else narrower.correction(config))

    def loss(log_probs):
      return objective(prepared.with_scores(log_probs, jnp.zeros_like(log_probs)))[0]

    return pack.unpack(jax.grad(loss)(jnp.full(batch.weights.shape, log_ratio)))

  at_once, later = slope("immediate", 0.0), slope("correction", 0.0)
  # The first rollout scored 1 at its first stage and 0 at the end.
  assert (at_once[0, 1:3] < 0).all() and (later[0, 1:3] > 0).all()
  assert not later[:, 3:].any()
  # 10 % up: inside the bound of the first update, beyond that of the second.
  assert slope("immediate", 0.1)[0, 1:3].all()
  assert not slope("correction", 0.1)[1, 1:3].any()


@pytest.mark.parametrize(
  "changes,field",
  [
    ({"policy_loss": PolicyLossConfig(clip_high=0.05)}, "passes.correction_clip_high"),
    ({"advantage": AdvantageConfig(whiten=True)}, "objective.advantage.whiten"),
    (
      {"advantage": AdvantageConfig(function=OwnAdvantage("module:own"))},
      "objective.advantage.function",
    ),
    ({"policy_loss": PolicyLossConfig(covariance="kl")}, "objective.policy_loss.covariance"),
  ],
)
def test_what_staged_rollouts_have_no_place_for_is_refused(changes, field):
  with pytest.raises(ConfigError, match=f"config.rl.{field}"):
    StagedConfig().check_objective(dataclasses.replace(ObjectiveConfig(), **changes), "config.rl")
