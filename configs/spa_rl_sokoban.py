r"""SPA-RL on Sokoban at toy size: the outcome of a game is attributed to its turns.

  python -m agentjax.train --config=configs/spa_rl_sokoban.py --workdir=runs/spa_rl
  python -m agentjax.train --config=configs/spa_rl_sokoban.py --workdir=runs/ppo \
      --config.rl.signals= --config.rl.phases=

2505.20732: for the first 40 steps the warm-started policy plays, the progress estimator learns what
its games came to, and the critic alone is trained beside it. Then the policy is paid by turn, the
estimated contribution and 1 for a turn of which an action was done, in PPO with GAE over turns. The
second command is PPO that is paid at the end. Sizes, warm start and rates are ours; the paper's
rate of the estimator, 3e-6, is that of a large model. No figures yet.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.spa_rl import ProgressConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment
from agentjax.training.experiment import PhaseConfig
from agentjax.training.selectors import SelectionConfig

_FIT = 40  # training steps


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "spa_rl_sokoban"
  objective = preset("ppo")
  objective.advantage.index_set = "turn"
  stage = experiment.rl
  stage.objective, stage.selection = objective, SelectionConfig()
  stage.phases = (PhaseConfig(steps=_FIT, objective=objective, trains="values"),)
  stage.signals = (ProgressConfig(fit_steps=_FIT, optimizer=OptimizerConfig(learning_rate=3e-4)),)
  return experiment
