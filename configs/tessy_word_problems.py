r"""Supervised learning on traces that a teacher and a student wrote together (TESSY, 2604.14164).

  make quickstart
  python -m agentjax.train --config=configs/opd_word_problems.py --workdir=runs/student \
      --config.rl.steps=0 --config.rl.teachers= --config.rl.objective.distillation=none
  python -m agentjax.recipes.tessy.synthesise --spans=labels.jsonl --predictor=words.npy
  python -m agentjax.recipes.tessy.synthesise --config=configs/tessy_word_problems.py \
      --predictor=words.npy \
      --config.data.source=word_problems \
      --student.path=runs/student --teacher.path=runs/quickstart --output=runs/traces
  python -m agentjax.train --config=configs/tessy_word_problems.py --workdir=runs/tessy

``labels.jsonl`` holds traces with the spans that are style (see
``agentjax.recipes.tessy.synthesise``). Real models stand in as Hugging Face folders or behind
endpoints: ``--teacher.http.base_url=http://host:8000/v1 --teacher.http.model=NAME``. The paper
trains on 80 thousand traces of one teacher; its rates and batch sizes were not found, those here
are ours.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("opd_word_problems.py"))
  experiment.name = "tessy_word_problems"
  experiment.data = DataConfig(
    path="runs/traces",
    source=JsonlConfig(name="tessy", messages_field="messages", test_file=""),
  )
  experiment.evaluation.tasks = 0  # the traces come without held-out tasks
  experiment.rl = type(experiment.rl)()
  experiment.supervised.steps = 100
  experiment.supervised.optimizer = OptimizerConfig(
    learning_rate=1e-3, schedule="cosine", warmup_steps=5
  )
  return experiment
