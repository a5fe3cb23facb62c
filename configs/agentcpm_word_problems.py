r"""AgentCPM-Explore on word problems: MiniRL, and episodes that mislead are left out.

  python -m agentjax.train --config=configs/agentcpm_word_problems.py --workdir=runs/agentcpm
  python -m agentjax.train --config=configs/agentcpm_word_problems.py --workdir=runs/minirl \
      --config.rl.signals= --config.reward.formula=exact_match

2602.06485 and its code: advantages times 2, groups of 8, and .2 between the shortest and the
longest of the right answers, and of the wrong ones. World, model, warm start and rates are those of
configs/quickstart.py. The second command is MiniRL alone.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.agentcpm import DenoiseConfig
from agentjax.recipes.scorers import RelativeConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it loss, reward and denoising of AgentCPM-Explore."""
  experiment.reward = RewardConfig(
    parts=("exact_match", "turns", "place"),
    weights=(),
    formula="exact_match + 0.2 * (0.5 - place if exact_match >= 1 else place - 0.5)",
    settings={"place": RelativeConfig(part="turns", form="place", among="exact_match")},
  )
  experiment.rl.objective = preset("minirl")
  experiment.rl.signals = (DenoiseConfig(),)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "agentcpm_word_problems"
  return change(experiment)
