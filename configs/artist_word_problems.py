r"""ARTIST on word problems: answers, their form and calls that work are paid.

  python -m agentjax.train --config=configs/artist_word_problems.py --workdir=runs/artist
  python -m agentjax.train --config=configs/artist_word_problems.py --workdir=runs/grpo \
      --config.reward.formula=exact_match

GRPO with answers of tools out of the loss, as everywhere here. World, model, warm start and rates
are those of configs/quickstart.py. The second command is GRPO that pays answers alone.
"""

import pathlib

from agentjax.recipes import Recipe
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="ARTIST",
    paper="abstract, and second-hand",
    changes=(
      "The reward has three terms: the answer, its form, and the share of the tool calls that "
      "succeeded. Answers of tools have no weight."
    ),
    commands=(
      "python -m agentjax.train --config=configs/artist_word_problems.py --workdir=runs/artist",
    ),
    tests=("tests/recipes/test_configs_of_methods.py",),
    data="word problems, generated",
    ours="the weights 2, 1 and 1 (that of the answer from memory); an episode without calls earns "
    "nothing for calls",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Makes it pay as ARTIST does."""
  experiment.reward = RewardConfig(
    parts=("exact_match", "format", "tool_calls", "tool_errors"),
    weights=(),
    formula="2 * exact_match + format + (1 - tool_errors if tool_calls > 0 else 0)",
  )
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "artist_word_problems"
  return change(experiment)
