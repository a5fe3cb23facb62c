r"""iStar on word problems: a reward model learns from pairs of episodes and pays turns.

  python -m agentjax.train --config=configs/istar_word_problems.py --workdir=runs/istar
  python -m agentjax.train --config=configs/istar_word_problems.py --workdir=runs/grpo \
      --config.rl.process=none --config.rl.objective.advantage.function=none

At every step the model learns which of two episodes of a task was better, against the policy as
the step begins; beta .05, alpha 1 and the bound of 10 on the model's gradient are those of iStar's
code. World, model, warm start and rates are those of configs/quickstart.py; the rate of the reward
model is ours. The second command is GRPO.
"""

import pathlib

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.istar import IStarAdvantages
from agentjax.recipes.prime import OnlineConfig, ProcessConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it iStar's rewards of turns."""
  stage = experiment.rl
  stage.objective = ObjectiveConfig(AdvantageConfig(function=IStarAdvantages()), PolicyLossConfig())
  online = OnlineConfig(loss="pairs", optimizer=OptimizerConfig(learning_rate=3e-4, clip_norm=10.0))
  stage.process = ProcessConfig(per="turn", against="policy", beta=0.05, online=online)
  stage.old_log_probs = "recomputed"
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "istar_word_problems"
  return change(experiment)
