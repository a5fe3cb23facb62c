r"""AgentCPM-Explore on word problems: MiniRL, and episodes that mislead are left out.

  python -m agentjax.train --config=configs/agentcpm_word_problems.py --workdir=runs/agentcpm
  python -m agentjax.train --config=configs/agentcpm_word_problems.py --workdir=runs/minirl \
      --config.rl.signals=

2602.06485 and its code: advantages against the mean of the others, times 2, groups of 8, and .2
between the shortest and the longest of the right answers, and of the wrong ones, among those that
are left; then episodes that ran out of room stay. World, model, warm start and rates are those of
configs/quickstart.py. The second command is MiniRL alone.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.agentcpm import DenoiseConfig
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it loss and denoising of AgentCPM-Explore."""
  experiment.rl.objective = preset("minirl")
  # Where denoising leaves wrong episodes alone, a deviation would make much of their small bonus.
  experiment.rl.objective.advantage.centre = "leave_one_out"
  experiment.rl.objective.advantage.scale = "none"
  experiment.rl.signals = (DenoiseConfig(spread=0.2),)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "agentcpm_word_problems"
  return change(experiment)
