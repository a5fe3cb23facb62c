r"""A block-diffusion policy on passages of books: how a text goes on after a few lines (DMax).

  python -m agentjax.train --config=configs/dmax_text.py --workdir=runs/dmax_text \
      --config.data.path=DIR
  python -m agentjax.recipes.dmax.decode --config=configs/dmax_text.py --config.data.path=DIR \
      --checkpoint=runs/dmax_text --samples_file=runs/dmax_text/decoded.txt

DIR holds *.txt or *.txt.gz. There is no answer to check: of the table that the second command
prints, only tokens a forward pass mean something. Blocks of 32 and the noise are those of
2604.08302; all else is ours.
"""

import pathlib

from agentjax.recipes.dmax import DMaxConfig
from agentjax.recipes.dmax.tasks import PassageConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("dmax_running_sums.py"))
  experiment.name = "dmax_text"
  experiment.data.source = PassageConfig()
  experiment.data.train_size, experiment.data.test_size = None, 64
  experiment.likelihood = DMaxConfig(block=32)
  experiment.engine.max_length = 320
  experiment.rollout.max_tokens_per_turn = 192
  experiment.rollout.max_total_tokens = 320
  experiment.supervised.row_length = 288
  experiment.supervised.microbatch_rows = 16
  experiment.supervised.tasks_per_step = 16
  experiment.evaluation.tasks = 64
  return experiment
