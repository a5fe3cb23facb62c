r"""MEDS: a wrong answer that a task has seen before costs more than a new one, on top of DAPO.

  python -m agentjax.train --config=configs/meds_word_problems.py --workdir=runs/meds
  python -m agentjax.train --config=configs/meds_word_problems.py --workdir=runs/dapo \
      --config.rl.signals=

2604.11297 with its alpha and beta for small models and DAPO's loss; the memory begins to count when
a task comes again, so there are few tasks here and each comes about every sixteen steps. ``radius``
is ours and depends on the model: look at ``meds/repeated``. Half of the layers give a feature, as
in the paper. Groups that are all wrong are kept: penalties give them something to learn from.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.meds import MedsConfig
from agentjax.text.answers import ANSWER_MARK
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it DAPO's loss, few tasks, and a memory of their wrong answers."""
  experiment.data.train_size = 256
  experiment.rl.objective = preset("dapo")
  experiment.rl.signals = (
    MedsConfig(marker=f"{ANSWER_MARK} ", alpha=0.1, beta=0.2, last_layers=2, radius=0.1),
  )
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "meds_word_problems"
  experiment.supervised.steps = 160
  experiment.rl.steps = 80
  return change(experiment)
