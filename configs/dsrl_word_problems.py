r"""DSRL: wrong answers are made unlikely without their question first, then GRPO.

  python -m agentjax.train --config=configs/dsrl_word_problems.py --workdir=runs/dsrl

For N0 steps (2604.14142, "NSR-PreRL") the update is on ``log P(y) = sum_t log p(y_t | y_<t)``, the
prompt left out but for the token that starts every conversation. Only wrong answers count,
``A = r - mean r < 0``, in PPO's loss with ratios of these very log-probs. Then the reference policy
becomes the present one and GRPO goes on, with all answers and with prompts.

N0 is 20 in the paper's script for 4B parameters, of 10 to 25 that it recommends; 10 here, of 40. A
loss that only pushes away has no floor: watch ``policy/entropy``, lengths and truncated episodes.
Where the paper has single turns, tool results stay in the context of later turns here (ours).
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment
from agentjax.training.experiment import PhaseConfig

RECIPES = (
  Recipe(
    name="DSRL (NSR-PreRL, then GRPO)",
    paper="2604.14142 and its code",
    changes=(
      "The first steps make wrong answers less likely without their question, log P(y) in the "
      "place of log P(y | x); then the reference policy becomes the present one, and GRPO goes on."
    ),
    commands=(
      "python -m agentjax.train --config=configs/dsrl_word_problems.py --workdir=runs/dsrl",
    ),
    tests=("tests/objectives/test_distillation.py", "tests/training/test_teacher.py"),
    data="word problems, generated",
    figures="docs/distillation.md: no gain at toy size",
    ours="10 of 40 steps; rates; tool results stay in the context of later turns",
    page="distillation.md#phases-and-learning-without-the-prompt-dsrl",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Gives it ten steps without questions."""
  experiment.rl.phases = (PhaseConfig(steps=10, objective=preset("nsr_prerl"), context="response"),)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "dsrl_word_problems"
  return change(experiment)
