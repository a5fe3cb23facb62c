r"""GRPO-TCR on word problems: means over tokens, clip-higher, a penalty for too long episodes.

  python -m agentjax.train --config=configs/grpo_tcr_word_problems.py --workdir=runs/grpo_tcr

The code of Open-AgentRL: bounds .2 / .28, dual clip 10, no KL, groups of 16, groups of equal
rewards replaced by new ones (10 batches at most), four updates a batch (64 tasks in minis of 16),
the penalty over the last fifth of the budget (4096 of 20480 tokens). Here the budget of drawn
tokens is half of an episode's room: 96 of 192, the rest is for prompt and results. World, model,
warm start and rates are those of configs/quickstart.py.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes import Recipe
from agentjax.recipes.scorers import OverlongConfig
from agentjax.training import Experiment, load_experiment
from agentjax.training.selectors import SelectionConfig

RECIPES = (
  Recipe(
    name="GRPO-TCR (Demystifying RL in agentic reasoning)",
    paper="its abstract and code, Open-AgentRL",
    changes=(
      "Token mean (T), clip-higher (C), overlong reward (R): long episodes weigh by their tokens, "
      "unlikely tokens may rise further in the later ones of four updates a batch, and the last "
      "fifth of the budget costs up to 1, and more beyond it."
    ),
    commands=(
      "python -m agentjax.train --config=configs/grpo_tcr_word_problems.py --workdir=runs/grpo_tcr",
    ),
    tests=("tests/recipes/test_losses_of_methods.py", "tests/recipes/scorers/test_lengths.py"),
    data="word problems, generated",
    ours="the budget of 96 drawn tokens; no choice of data by difficulty",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Gives it loss, penalty and selection of GRPO-TCR."""
  room = experiment.rollout.max_total_tokens
  assert isinstance(room, int)
  limit = room // 2  # drawn tokens; prompt and results take up to 80 of the quickstart's 192
  experiment.rollout.group_size = 16
  experiment.reward.parts = (*experiment.reward.parts, "overlong")
  experiment.reward.weights = (*experiment.reward.weights, 1.0)
  experiment.reward.settings["overlong"] = OverlongConfig(limit=limit, buffer=limit // 5)
  experiment.rl.objective = ObjectiveConfig(
    AdvantageConfig(), PolicyLossConfig(clip_high=0.28, dual_clip=10.0, aggregation="token_mean")
  )
  experiment.rl.selection = SelectionConfig(rule="band", above=0.0, refill=10)
  experiment.rl.minibatches = 4  # at the first update of a batch the ratio is 1, inside any bound
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "grpo_tcr_word_problems"
  return change(experiment)
