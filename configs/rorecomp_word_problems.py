r"""RoRecomp on word problems: short successes against long failures, the rest by themselves.

  python -m agentjax.train --config=configs/rorecomp_word_problems.py --workdir=runs/rorecomp
  python -m agentjax.train --config=configs/rorecomp_word_problems.py --workdir=runs/grpo \
      --config.rl.passes=none

The second command is plain GRPO on all episodes. Model, warm start and rates are those of the
quickstart; the share of episodes, the buffer and the chance of a compensation batch are ours. No
figures yet.
"""

import pathlib

from agentjax.recipes.rorecomp import RecompositionConfig
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Recomposes batches."""
  stage = experiment.rl
  episodes = stage.tasks_per_step * experiment.rollout.group_size
  stage.passes = RecompositionConfig(capacity=2 * episodes, compensation=episodes // 2)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "rorecomp_word_problems"
  return change(experiment)
