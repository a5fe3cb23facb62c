r"""Self-play preference optimisation on word problems at toy size: log-ratios go to win rates.

  python -m agentjax.train --config=configs/self_play_preference_word_problems.py \
      --workdir=runs/self_play_preference

2405.00675: over the episodes of a task, the log-ratio of an episode to the policy before the update
is drawn towards ``eta (win rate - 1/2)``. Here an episode wins against those of its task with lower
rewards, which is ours: the paper asks a preference model. The targets are approached in several
updates with the same episodes (--config.rl.epochs). World, model and warm start are those of
configs/quickstart.py.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="Self-play preference optimisation",
    paper="2405.00675",
    changes="The log-ratio of an episode is drawn towards its win rate within the group.",
    commands=(
      "python -m agentjax.train --config=configs/self_play_preference_word_problems.py \\\n"
      "  --workdir=runs/self_play_preference",
    ),
    tests=("tests/objectives/test_sppo.py",),
    data="word problems, generated",
    ours="win rates from rewards, where the paper asks a preference model",
    page="custom_loss.md",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Gives it the squared loss on win rates."""
  experiment.rl.objective = preset("self_play_preference")
  experiment.rl.epochs = 2
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "self_play_preference_word_problems"
  return change(experiment)
