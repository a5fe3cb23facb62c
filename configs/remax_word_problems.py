r"""ReMax on word problems at toy size: a greedy episode a task is the baseline, and no critic.

  python -m agentjax.train --config=configs/remax_word_problems.py --workdir=runs/remax

2310.10505: ``A = R(y) - R(y_greedy)`` on every token of y, one sampled episode a task. The greedy
one is played beside it, recorded and replayed like any, and not trained on: baseline/reward is its
mean reward, reward/mean that of the sampled. Larger groups share one greedy episode. Model, warm
start and learning rates are those of quickstart.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it single episodes and a greedy one beside each."""
  experiment.rollout.group_size = 1
  experiment.rl.objective = preset("remax")
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "remax_word_problems"
  experiment.rl.tasks_per_step = 64
  return change(experiment)
