r"""A block-diffusion policy on the worked solutions of GSM8K, as plain text (DMax).

  python -m agentjax.train --config=configs/dmax_gsm8k.py --workdir=runs/dmax_gsm8k \
      --config.data.path=DIR
  python -m agentjax.recipes.dmax.decode --config=configs/dmax_gsm8k.py --config.data.path=DIR \
      --checkpoint=runs/dmax_gsm8k

DIR holds GSM8K's train.jsonl and test.jsonl. Blocks of 32 and the noise are those of 2604.08302;
model and rates are ours, and far too small to solve such problems: a policy of this size learns how
solutions are written.
"""

import pathlib

from agentjax.recipes.dmax import DMaxConfig
from agentjax.recipes.dmax.tasks import WordProblemFilesConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("dmax_running_sums.py"))
  experiment.name = "dmax_gsm8k"
  experiment.data.source = WordProblemFilesConfig()
  experiment.data.train_size = experiment.data.test_size = None
  experiment.likelihood = DMaxConfig(block=32)
  experiment.engine.max_length = 2048
  experiment.rollout.max_tokens_per_turn = 1024
  experiment.rollout.max_total_tokens = 2048
  experiment.supervised.row_length = 2048
  experiment.supervised.microbatch_rows = 2
  experiment.supervised.tasks_per_step = 16
  return experiment
