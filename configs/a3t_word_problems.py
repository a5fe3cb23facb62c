r"""The contrast of A3T on word problems: successes become likelier, failures less likely.

  python -m agentjax.train --config=configs/a3t_word_problems.py --workdir=runs/a3t
  python -m agentjax.train --config=configs/a3t_word_problems.py --workdir=runs/successes \
      --config.reward.formula=exact_match

2403.14589 (abstract): policy gradient with rewards of 1 and -1 and no comparison within a task. The
second command learns from successes alone, which is supervised learning on them. World, model, warm
start and rates are those of configs/quickstart.py.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes import Recipe
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="A3T (contrast)",
    paper="2403.14589, abstract",
    changes="Rewards are 1 and -1 and nothing is subtracted, so that a group without any "
    "difference teaches too; the log-likelihood is weighed by them.",
    commands=("python -m agentjax.train --config=configs/a3t_word_problems.py --workdir=runs/a3t",),
    tests=("tests/recipes/test_losses_of_methods.py",),
    data="word problems, generated",
    ours=("the weighting of successes and failures is equal; updates by step, not in four rounds"),
    missing="ActRe, which writes reasons for actions afterwards",
  ),
  Recipe(
    name="AgentEvol (reward-weighted likelihood)",
    paper="2406.04151 and its code",
    changes="What the policy found is learnt with its reward as weight; with rewards of 1 and 0 "
    "that is supervised learning on successes, and nothing is compared within a task.",
    commands=(
      "python -m agentjax.train --config=configs/a3t_word_problems.py \\\n"
      "  --workdir=runs/agent_evol --config.reward.formula=exact_match",
    ),
    tests=("tests/recipes/test_losses_of_methods.py",),
    data="word problems, generated",
    ours="updates by step, from where the last one ended",
    missing="Rounds that begin again at the base model with all successes so far",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Gives it rewards of 1 and -1 and a weighted likelihood."""
  experiment.reward = RewardConfig(
    parts=("exact_match",), weights=(), formula="1 if exact_match >= 1 else -1"
  )
  experiment.rl.objective = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none"),
    PolicyLossConfig(gradient_form="score", clip="unit", aggregation="sequence_mean_token_sum"),
  )
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "a3t_word_problems"
  return change(experiment)
