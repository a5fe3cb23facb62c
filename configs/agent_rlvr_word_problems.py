r"""Agent-RLVR on word problems: where all fail, some try again with a hint and learn without it.

  python -m agentjax.train --config=configs/agent_rlvr_word_problems.py --workdir=runs/agent_rlvr
  python -m agentjax.train --config=configs/agent_rlvr_word_problems.py --workdir=runs/grpo \
      --config.rollout.sampler=independent
  python -m agentjax.train --config=configs/agent_rlvr_word_problems.py \
      --workdir=runs/agent_rlvr_dpo --config.rl.objective=dpo

The hint of a task are the calls of its worked solution, where it has any. World, model, warm start
and rates are those of configs/quickstart.py, with hints among the prompts of the warm start left
out: the policy sees them in a retry for the first time. The second command is GRPO, the third
learns from pairs, as the paper does.
"""

import pathlib

from agentjax.recipes.agent_rlvr import GuidedConfig
from agentjax.training import Experiment, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Lets failed groups try again."""
  experiment.rollout.sampler = GuidedConfig()
  experiment.rl.old_log_probs = "recomputed"
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "agent_rlvr_word_problems"
  experiment.engine.max_length = experiment.rollout.max_total_tokens = 256  # room for hints
  return change(experiment)
