r"""Agent0's solver on word problems without answers: the majority of a group is the label.

  python -m agentjax.train --config=configs/agent0_word_problems.py --workdir=runs/agent0
  python -m agentjax.train --config=configs/agent0_word_problems.py --workdir=runs/majority \
      --config.rl.objective=grpo

2511.16043 and its code: groups of 16, tasks with an agreement of .3 to .8, ADPO with s_min .6 and a
KL of .01. Four updates a batch are ours: with one the ratio is 1 and no clip bound acts. World,
model, warm start and rates are those of configs/quickstart.py. The part "exact_match" is watched
and not paid. The second command is GRPO on the same labels.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.agent0 import MajorityConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment
from agentjax.training.selectors import SelectionConfig


def change(experiment: Experiment) -> Experiment:
  """Gives it labels, selection and loss of Agent0."""
  experiment.rollout.group_size = 16
  experiment.reward = RewardConfig(
    parts=("majority", "exact_match"), weights=(1.0, 0.0), settings={"majority": MajorityConfig()}
  )
  experiment.rl.objective = preset("adpo")
  experiment.rl.selection = SelectionConfig(
    rule="band", score="agentjax.recipes.agent0:consistency", above=0.3, below=0.8
  )
  experiment.rl.minibatches = 4
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "agent0_word_problems"
  return change(experiment)
