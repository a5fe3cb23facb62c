r"""GrandCode's summariser alone: GRPO on single compressions of a trace.

  python -m agentjax.train --config=configs/grandcode_summariser.py --workdir=runs/summariser \
      --config.pretrained=FOLDER --config.data.path=DIR

All episodes of a group compress the same trace, wrong attempts at a task and what became of them. A
solver that sees the summary and not the trace goes on; its reward, less the cost of a long summary,
is the summary's. The solver is the policy as it was at the start (--config.seats.solver=none lets
it learn as well). FOLDER is that of a Qwen3 model, DIR holds mbpp.jsonl. 2604.02721; figures are
ours, and none has been measured.
"""

import pathlib

from agentjax.recipes.grandcode.settings import SOLVER, SUMMARISER
from agentjax.rollout.config import IndependentConfig
from agentjax.rollout.seat_config import SnapshotSeat
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("grandcode_code.py"))
  experiment.name = "grandcode_summariser"
  experiment.world.stages = (SUMMARISER,)
  experiment.world.seats.solutions = 1
  experiment.seats[SOLVER] = SnapshotSeat(every=0)
  experiment.reward.parts, experiment.reward.weights = ("environment",), (1.0,)
  experiment.reward.settings.clear()
  experiment.rollout.sampler = IndependentConfig()
  experiment.rl.passes = None
  experiment.data.train_size = None
  return experiment
