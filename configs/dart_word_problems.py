r"""DART on word problems: stored successes for groups that failed, weights against the sampler.

  python -m agentjax.train --config=configs/dart_word_problems.py --workdir=runs/dart

The code of DART-GUI: bounds .1 / .28, dual clip 10, KL .1, weights min(pi_old / pi_rollout, 1) on
tokens, one update after another while episodes go on. The bounds act only with several updates a
batch (--config.rl.minibatches=4); here there is one. A success is remembered by its task, so there
are few tasks here and each comes about every sixteen steps. World, model and rates are those of
configs/quickstart.py.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.objectives.mismatch import MismatchConfig
from agentjax.recipes import Recipe
from agentjax.recipes.selectors import SuccessesConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="DART-GUI",
    paper="its abstract and code",
    changes=(
      "A stored success of the task takes the place of an episode in a group that failed as a "
      "whole; a token weighs min(pi_old / pi_rollout, 1); episodes and updates run side by side."
    ),
    commands=(
      "python -m agentjax.train --config=configs/dart_word_problems.py --workdir=runs/dart",
    ),
    tests=(
      "tests/recipes/test_losses_of_methods.py",
      "tests/recipes/selectors",
      "tests/test_method_configs.py",
    ),
    data="word problems, generated; the paper's are tasks on a screen",
    ours="256 tasks; staleness 1; one update a batch, with which clip bounds do not act; successes "
    "come from the run alone",
    missing=(
      "The numbers of episodes by task and the choice of the 80% most uncertain turns, "
      "which its code has switched off"
    ),
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Gives it loss, memory and schedule of DART, and tasks that come again."""
  experiment.data.train_size = 256
  experiment.rl.objective = ObjectiveConfig(
    AdvantageConfig(),
    PolicyLossConfig(
      clip_low=0.1,
      clip_high=0.28,
      dual_clip=10.0,
      kl_coefficient=0.1,
      mismatch=MismatchConfig(weight_level="token", weight_cap=1.0),
    ),
  )
  experiment.rl.old_log_probs = "recomputed"
  experiment.rl.signals = (SuccessesConfig(),)
  experiment.rl.schedule = ScheduleConfig(mode="async", staleness=1)
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "dart_word_problems"
  experiment.supervised.steps = 160
  experiment.rl.steps = 80
  return change(experiment)
