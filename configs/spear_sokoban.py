r"""SPEAR on Sokoban at toy size: acting is paid for at first, then successes are imitated.

  python -m agentjax.train --config=configs/spear_sokoban.py --workdir=runs/spear
  python -m agentjax.train --config=configs/spear_sokoban.py --workdir=runs/dr_bot \
      --config.rl.signals= --config.rl.objective.advantage.function=none

2509.22601: cosine schedules of 100 steps, bounds .2 / .28, no KL, advantages without deviation,
sums over tokens by a constant; episodes that were cut off, or that say the same 20 tokens 10 times,
teach nothing. Moves are text here, so every turn counts as a call. The second command is its
baseline without the curriculum and clip-cov. Model, warm start, the memory of 32 episodes and rates
are ours. No figures yet.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.spear import SpearAdvantages, SpearConfig
from agentjax.training import Experiment, load_experiment
from agentjax.training.selectors import SelectionConfig
from agentjax.trajectory.weights import WeightConfig


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "spear_sokoban"
  stage = experiment.rl
  stage.objective = ObjectiveConfig(
    AdvantageConfig(scale="none", function=SpearAdvantages()),
    PolicyLossConfig(clip_high=0.28, aggregation="constant", aggregation_constant=160.0),
  )
  stage.selection = SelectionConfig()
  stage.weights = WeightConfig(rules=("role", "incomplete", "repetitive"))
  stage.signals = (SpearConfig(capacity=32, calls="turn"),)
  return experiment
