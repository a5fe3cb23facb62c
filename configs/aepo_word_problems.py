r"""AEPO on word problems: ARPO with a budget by entropy, and uncertain tokens that count more.

  python -m agentjax.train --config=configs/aepo_word_problems.py --workdir=runs/aepo

2510.14545, which we know second-hand and from a port: the entropies of a first episode decide how
many of the others branch, branches that follow one another on a path become rarer, and advantages
grow with the entropy of the token, whose gradient outlives the clip bound. Clip bounds, the floor
of the factor and the four updates a batch are ours: with one update the ratio is 1 and no bound
acts. Everything else is configs/arpo_word_problems.py.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.arpo import BranchConfig
from agentjax.recipes.credit import EntropyTerm
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it groups of 16 that branch by entropy, and both update rules."""
  experiment.rollout.group_size = 16
  experiment.rollout.sampler = BranchConfig(
    roots=8, budget="entropy", rule="threshold", penalty=0.05
  )
  experiment.rl.objective = ObjectiveConfig(
    AdvantageConfig(terms=(EntropyTerm(),)),
    PolicyLossConfig(),
    function="agentjax.recipes.credit.entropy:entropy_balanced_clip",
  )
  experiment.rl.minibatches = 4
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "aepo_word_problems"
  experiment.rl.tasks_per_step = 8
  return change(experiment)
