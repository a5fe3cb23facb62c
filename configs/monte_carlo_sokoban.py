r"""Sokoban at toy size without a critic: completions from between turns say what they were worth.

  python -m agentjax.train --config=configs/monte_carlo_sokoban.py --workdir=runs/monte_carlo

From before every turn four further episodes go on by the same policy; the mean of their rewards is
the value of the state, and a turn is paid what the game paid it and the value that it added. The
rewards to go of a turn are then those of its episode less the value before it, with which VinePPO
(2410.01679) compares. That costs about ten episodes for one of four turns; they are played for
that alone. --config.rollout.sampler.form=label gives Math-Shepherd's labels instead. Game,
model, warm start and learning rates are those of configs/ragen_sokoban.py, the number of
completions is ours.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.monte_carlo import MonteCarloConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "monte_carlo_sokoban"
  experiment.reward = RewardConfig(parts=("environment", "monte_carlo"), weights=(1.0, 1.0))
  experiment.rollout.group_size = 4
  experiment.rollout.sampler = MonteCarloConfig(completions=4)
  experiment.rl.objective = ObjectiveConfig(
    AdvantageConfig(
      centre="none",
      scale="none",
      credit="reward_to_go",
      index_set="turn",
      turn_rewards=("environment", "monte_carlo"),
      whiten=True,
    ),
    PolicyLossConfig(clip_high=0.28),
  )
  return experiment
