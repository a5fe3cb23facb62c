"""iStar's advantages by hand, and the reward model that learns from pairs."""

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.objectives.advantage_function import AdvantageInputs
from agentjax.recipes.istar import IStarAdvantages
from agentjax.recipes.prime import OnlineConfig, ProcessConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Run
from agentjax.training.build import Extensions
from agentjax.training.metrics import read_metrics
from tests.training.smoke import quiet, smoke_experiment


def inputs(rewards, steps):
  """Two episodes a group, of two turns of two tokens; ``steps`` by episode and turn."""
  number = len(rewards)
  segment_ids = jnp.repeat(jnp.arange(1, number + 1), 4)[None]
  turns = jnp.tile(jnp.array([0, 0, 1, 1]), number)[None]
  paid = np.zeros((1, 4 * number), np.float32)
  paid[0, 1::2] = np.ravel(steps)
  fill = jnp.ones((1, 4 * number))
  return AdvantageInputs(
    rewards=jnp.array(rewards, jnp.float32),
    valid=jnp.ones(number, bool),
    groups=jnp.arange(number) // 2,
    weights=fill,
    segment_ids=segment_ids,
    turns=turns,
    old_log_probs=-fill,
    behaviour_log_probs=-fill,
    entropies=fill,
    columns={"token_rewards": jnp.array(paid)},
  )


def test_a_turn_has_its_own_advantage_beside_that_of_the_outcome():
  """Only the first turn of the success is good: plain GRPO gives both of its turns the same."""
  steps = [[4.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
  found = IStarAdvantages()(inputs([1.0, 0.0, 0.0, 0.0], steps))[0]
  outcome, spread = 0.5**0.5, 3**0.5
  first = [outcome + 3 / spread, outcome - 1 / spread, -outcome - 1 / spread, -outcome - 1 / spread]
  np.testing.assert_allclose(found[:8], np.repeat(first, 2), rtol=1e-5)
  np.testing.assert_allclose(found[8:], 0, atol=1e-6)


def test_the_weight_and_leave_one_out():
  chosen = IStarAdvantages(centre="leave_one_out", scale="none", weight=0.5)
  found = chosen(inputs([1.0, 0.0], [[1.0, -1.0], [1.0, -1.0]]))[0]
  np.testing.assert_allclose(found, np.repeat([1.5, 0.5, -0.5, -1.5], 2), rtol=1e-5)


def test_an_episode_that_is_not_valid_is_in_no_mean():
  given = inputs([1.0, 0.0, 1.0, 0.0], [[1.0, -1.0]] * 3 + [[99.0, 5.0]])
  found = IStarAdvantages()(given.replace(valid=jnp.array([True, True, True, False])))[0]
  np.testing.assert_allclose(found[8:12], [1, 1, -1, -1], atol=1e-5)


def test_without_a_process_that_pays_turns_it_is_refused():
  experiment = smoke_experiment()
  experiment.rl.objective = ObjectiveConfig(AdvantageConfig(function=IStarAdvantages()))
  for process in (None, ProcessConfig(per="token")):
    experiment.rl.process = process
    with pytest.raises(ConfigError, match=r"config\.rl\.process.*per='turn'"):
      experiment.validate()


def test_a_model_that_learns_nothing_is_not_compared_with_itself():
  with pytest.raises(ConfigError, match="against='policy'.*pays nothing"):
    ProcessConfig(against="policy").validate()


def _even_ids(trajectory, task):
  """Differs within almost every group, so that there are pairs."""
  del task
  drawn = np.concatenate([s.token_ids[s.sampled] for s in trajectory.segments])
  return float(np.mean(drawn % 2 == 0))


@pytest.mark.slow
def test_a_run_learns_from_pairs(tmp_path):
  experiment = smoke_experiment(reward=RewardConfig(parts=("even",), weights=(1.0,)))
  experiment.rl.objective = ObjectiveConfig(
    AdvantageConfig(function=IStarAdvantages()), PolicyLossConfig()
  )
  experiment.rl.process = ProcessConfig(
    per="turn", against="policy", online=OnlineConfig(loss="pairs")
  )
  experiment.rl.old_log_probs = "recomputed"
  experiment.evaluation.tasks = 0
  extensions = Extensions(scorers={"even": _even_ids})
  assert Run(experiment, tmp_path, extensions=extensions, console=quiet()).train().finished
  rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "process/loss" in r]
  assert rows and all(0 < row["process/loss"] < 2 for row in rows)
