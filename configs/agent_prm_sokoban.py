r"""AgentPRM on Sokoban at toy size: a model of promise pays every turn its progress.

  python -m agentjax.train --config=configs/agent_prm_sokoban.py --workdir=runs/agent_prm
  python -m agentjax.train --config=configs/agent_prm_sokoban.py --workdir=runs/ppo \
      --config.rl.signals=

2511.08325: a network reads each game and learns, from labels by temporal differences and GAE, how
promising every turn is; the difference of two promises is the progress of a turn, which the policy
is paid in PPO with GAE over turns. The second command is PPO that is paid at the end. The paper's
beta, gamma and lambda are not known to us; these, sizes, warm start and rates are ours. No figures
yet.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.agent_prm import AgentPrmConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment
from agentjax.training.selectors import SelectionConfig


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "agent_prm_sokoban"
  objective = preset("ppo")
  objective.advantage.index_set = "turn"
  stage = experiment.rl
  stage.objective, stage.selection = objective, SelectionConfig()
  stage.signals = (AgentPrmConfig(optimizer=OptimizerConfig(learning_rate=3e-4)),)
  return experiment
