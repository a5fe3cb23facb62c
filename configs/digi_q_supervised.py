r"""The supervised stages of Digi-Q: the backbone on questions, the policy on its best actions.

  python -m agentjax.train --config=configs/digi_q_supervised.py --workdir=runs/backbone \
      --config.data.path=runs/transitions/representation --config.start_from=runs/logged
  python -m agentjax.train --config=configs/digi_q_supervised.py --workdir=runs/digi_q \
      --config.data.path=runs/best --config.start_from=runs/logged

configs/digi_q_frozen_lake.py has all the commands. Rates and sizes are ours.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.training import Experiment, OptimizerConfig, RLStage, load_experiment
from agentjax.world.world import default_world


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("digi_q_frozen_lake.py"))
  experiment.name = "digi_q_supervised"
  experiment.data = DataConfig(
    train_size=None, source=JsonlConfig(messages_field="messages", answer_field="", test_file="")
  )
  experiment.world = default_world()
  experiment.reward = type(experiment.reward)()
  experiment.evaluation.tasks = 0  # rows come without held-out tasks
  experiment.evaluation.success_part = type(experiment.evaluation)().success_part
  experiment.rl = RLStage()
  experiment.supervised.steps = 150
  experiment.supervised.optimizer = OptimizerConfig(
    learning_rate=5e-4, schedule="cosine", warmup_steps=10
  )
  return experiment
