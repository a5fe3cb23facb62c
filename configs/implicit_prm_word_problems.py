r"""A reward model from outcomes alone, whose log-ratios are process rewards.

  python -m agentjax.train --config=configs/implicit_prm_word_problems.py --workdir=runs/prm

2502.01456: with ``s = sum_t log pi(y_t) - log pi_ref(y_t)``, the loss is the cross-entropy of
``sigmoid(beta s)`` and the outcome, 0 or 1. The warm start and its seed are those of quickstart, so
that pi_ref is the policy that configs/prime_word_problems.py starts from. PRIME trains
this model beside the policy, on the policy's episodes; here it is trained first, on its own. beta
and the learning rate are ours.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "implicit_prm_word_problems"
  experiment.rl.objective = preset("implicit_prm")
  experiment.rl.old_log_probs = "recomputed"
  experiment.rl.optimizer.learning_rate = 1e-4
  return experiment
