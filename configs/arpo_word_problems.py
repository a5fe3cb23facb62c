r"""ARPO on word problems: half of a group starts at the prompt, half where the policy was unsure.

  python -m agentjax.train --config=configs/arpo_word_problems.py --workdir=runs/arpo

The policy and the tasks are those of configs/quickstart.py. Sixteen episodes a task, eight of them
from the start (2507.19849), and four updates a batch, where its script makes eight: with one the
ratio is 1 and no bound acts. --config.rl.objective.advantage.terms=shared gives shared tokens the
mean advantage of their branches. configs/aepo_word_problems.py is AEPO.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.arpo import BranchConfig
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it groups of 16 that branch."""
  experiment.rollout.group_size = 16
  experiment.rollout.sampler = BranchConfig(roots=8)
  experiment.rl.objective = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig())
  experiment.rl.minibatches = 4
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "arpo_word_problems"
  experiment.rl.tasks_per_step = 8
  return change(experiment)
