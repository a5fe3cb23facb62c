r"""Sokoban at toy size, trained on the most valuable leaves of a search over turns.

  python -m agentjax.train --config=configs/tree_search_sokoban.py --workdir=runs/tree_search
  python -m agentjax.train --config=configs/tree_search_sokoban.py --workdir=runs/uct \
      --config.rollout.sampler.rule=uct

At every depth the two most valuable states are expanded by four turns each. A state is worth what
the game has paid so far; --config.rollout.sampler.score=MODULE:FUNCTION values it otherwise. Game,
model, warm start and learning rates are those of configs/ragen_sokoban.py, the tree's sizes are
ours.
"""

import pathlib

from agentjax.recipes.tree_search import TreeConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "tree_search_sokoban"
  experiment.rollout.group_size = 8
  experiment.rollout.sampler = TreeConfig(
    score="agentjax.rewards.scorers:environment", width=4, beam=2
  )
  return experiment
