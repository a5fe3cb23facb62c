r"""Agentic GRPO on Sokoban at toy size: a turn learns from its own reward, then from its outcome.

  python -m agentjax.train --config=configs/agentic_grpo_sokoban.py --workdir=runs/agentic_grpo

With r_t what the game paid turn t and r_N what it paid the episode, every step makes two updates
(2604.02721, second-hand): one with the z-score of r_t over turn t of the group, one with that of
``r_N - r_t`` in narrower bounds, --config.rl.passes.correction_clip_low and _high. The source
updates as soon as r_t is known; here all turns of a step are played before it is trained on.
Bounds are ours. Game, model, warm start and learning rates are those of configs/ragen_sokoban.py.
"""

import pathlib

from agentjax.objectives import ObjectiveConfig
from agentjax.recipes.agentic_grpo import StagedConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "agentic_grpo_sokoban"
  experiment.rl.objective = ObjectiveConfig()
  experiment.rl.passes = StagedConfig()
  return experiment
