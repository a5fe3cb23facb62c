r"""GRPO-RoC on word problems: of 16 episodes 8 are trained on, the successes with fewest errors.

  python -m agentjax.train --config=configs/grpo_roc_word_problems.py --workdir=runs/roc
  python -m agentjax.train --config=configs/grpo_roc_word_problems.py --workdir=runs/grpo \
      --config.rl.signals= --config.rollout.group_size=8

2508.20722 samples 32 and keeps 16, with bounds .2 / .28, no KL and no entropy bonus; groups whose
rewards are all alike are not trained on. The bounds act only with several updates a batch
(--config.rl.minibatches=4); here there is one. The second command is plain GRPO with as many
episodes an update. Model, warm start and rates are those of the quickstart. No figures yet.
"""

import dataclasses
import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.grpo_roc import RocConfig
from agentjax.training import Experiment, load_experiment
from agentjax.training.selectors import SelectionConfig


def change(experiment: Experiment) -> Experiment:
  """Samples twice as many episodes and keeps the cleaner half."""
  experiment.rollout = dataclasses.replace(experiment.rollout, group_size=16)
  stage = experiment.rl
  stage.objective = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28))
  stage.selection = SelectionConfig(rule="band", above=0.0)
  stage.signals = (RocConfig(keep=8),)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "grpo_roc_word_problems"
  return change(experiment)
