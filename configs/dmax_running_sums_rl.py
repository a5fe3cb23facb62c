r"""Reinforcement learning of the policy of dmax_running_sums, over the bound on its likelihood.

  python -m agentjax.train --config=configs/dmax_running_sums_rl.py --workdir=runs/dmax_rl \
      --config.start_from=runs/dmax

GRPO with ratios of the bound: old and new log-probs are estimated with the same masks. Episodes are
drawn by soft parallel decoding at a temperature of 1. All figures are ours; docs/dmax.md.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, OptimizerConfig, RLStage, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("dmax_running_sums.py"))
  experiment.name = "dmax_running_sums_rl"
  experiment.supervised.steps = 0
  experiment.likelihood.draws = 2
  experiment.rl = RLStage(
    steps=20,
    tasks_per_step=8,
    row_length=96,
    microbatch_rows=32,
    old_log_probs="recomputed",
    objective=preset("grpo"),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=2),
  )
  return experiment
