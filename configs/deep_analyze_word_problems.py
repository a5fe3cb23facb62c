r"""The reward of DeepAnalyze on word problems: -1 without the form, else task and code together.

  python -m agentjax.train --config=configs/deep_analyze_word_problems.py --workdir=runs/analyze

2510.16872 and its code: -1 where a part of the answer is missing, otherwise the mean of the score
of the task and the share of the code that ran, or the score alone where there was no code; groups
of 5, no KL. With a model that writes the tags of the paper:

  --config.rollout.answer=text \
      --config.reward.parts=exact_match,tags,tool_calls,tool_errors,turns \
      --config.reward.settings.tags.tags=Analyze,Answer

and ``tags`` for ``format`` in the formula. Research has ``min(turns / 10, 1)`` as one more term of
the mean. World, model, warm start and rates are those of configs/quickstart.py.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes import Recipe
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="DeepAnalyze (reward)",
    paper="2510.16872 and its code",
    changes="A gate with the value -1 for the form; behind it the mean of the score of the task "
    "and the share of the code that ran, or the score alone where there was no code.",
    commands=(
      "python -m agentjax.train --config=configs/deep_analyze_word_problems.py \\\n"
      "  --workdir=runs/analyze",
    ),
    tests=("tests/recipes/test_configs_of_methods.py",),
    data="word problems, generated",
    ours="a readable answer stands for the tags",
    missing="The judge of reports and the two supervised stages",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Makes it pay as DeepAnalyze does."""
  experiment.rollout.group_size = 5
  experiment.reward = RewardConfig(
    parts=("exact_match", "format", "tool_calls", "tool_errors"),
    weights=(),
    formula="-1 if format < 1 else (exact_match + 1 - tool_errors) / 2 if tool_calls > 0 "
    "else exact_match",
  )
  experiment.rl.objective = ObjectiveConfig(AdvantageConfig(), PolicyLossConfig())
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "deep_analyze_word_problems"
  return change(experiment)
