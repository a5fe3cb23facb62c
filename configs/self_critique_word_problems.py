r"""Kimi K2's self-critique on word problems: half of them hide their answer from the reward.

  python -m agentjax.train --config=configs/self_critique_word_problems.py \
      --workdir=runs/self_critique
  python -m agentjax.train --config=configs/self_critique_word_problems.py --workdir=runs/plain \
      --config.rollout.sampler.hidden=0

Where the answer is known, answers are paid by it, and the policy's comparisons of them if they
agree with it. Where it is hidden, answers are paid by how often the policy prefers them. In the
second command all answers are known. World, model, warm start and rates are those of
configs/quickstart.py. No demonstration shows a comparison, and the prompt of one is long for a
policy of this size: this shows how a run works, not how well.
"""

import pathlib

from agentjax.recipes.self_critique import SelfCritiqueConfig
from agentjax.recipes.self_critique.critique import Rubrics
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment

FORMULA = "environment if critique else exact_match if verified else preferred"


def change(experiment: Experiment) -> Experiment:
  """The policy compares its own answers."""
  experiment.rollout.sampler = SelfCritiqueConfig(
    hidden=0.5, rubrics=Rubrics(core=("It is right.",), prescriptive=())
  )
  experiment.reward = RewardConfig(
    parts=("exact_match", "preferred", "verified", "critique", "environment"),
    weights=(),
    formula=FORMULA,
  )
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "self_critique_word_problems"
  # The prompt of a comparison holds the problem and two answers.
  experiment.engine.max_length = experiment.rollout.max_total_tokens = 1024
  experiment.rl.row_length, experiment.rl.microbatch_rows = 1024, 4
  return change(experiment)
