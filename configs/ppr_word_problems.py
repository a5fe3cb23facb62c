r"""PPR with ReNorm on word problems: every step earns its score and the outcome, less 1.

  python -m agentjax.train --config=configs/ppr_word_problems.py --workdir=runs/ppr
  python -m agentjax.train --config=configs/ppr_word_problems.py --workdir=runs/ppo \
      --config.reward.weights=0,1,0 --config.rl.objective.advantage.turn_rewards=

PPO with GAE over turns. As it stands a step is worth the share of its calls that succeeded;
``reward.settings.process.judge`` names a judge who reads steps. An answer without calls earns 1 or
-1 by the outcome (ours). World, model, warm start and rates are those of configs/quickstart.py. The
second command is PPO that is paid the outcome.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.ppr import PrinciplesConfig
from agentjax.recipes.scorers import RenormConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Makes it pay steps by ReNorm."""
  experiment.reward = RewardConfig(
    parts=("process", "exact_match", "renorm"),
    weights=(0.0, 0.0, 1.0),
    settings={"process": PrinciplesConfig(), "renorm": RenormConfig()},
  )
  objective = preset("ppo")
  objective.advantage.index_set = "turn"
  objective.advantage.turn_rewards = ("renorm",)
  experiment.rl.objective = objective
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "ppr_word_problems"
  return change(experiment)
