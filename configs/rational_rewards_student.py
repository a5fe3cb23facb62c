r"""RationalRewards, the student: supervised learning on a teacher's critiques that passed a filter.

1. python -m agentjax.recipes.rational_rewards.synthesise --pairs=pairs.jsonl \
       --output=runs/parrot --teacher.http.base_url=URL --teacher.http.model=NAME
2. python -m agentjax.train --config=configs/rational_rewards_student.py --workdir=runs/student \
       --config.pretrained=FOLDER
3. python -m agentjax.recipes.rational_rewards.compare --pairs=others.jsonl \
       --config=configs/rational_rewards_student.py --config.pretrained=FOLDER \
       --judge.path=runs/student
4. python -m agentjax.convert --input=runs/student --output=student --dtype=bfloat16

The folder ``student`` behind an endpoint is then the judge of configs/rational_rewards_judged.py.

2604.11626: three epochs, learning rate 1e-5, cosine, a warm-up of .05, weight decay 1e-6, a cut-off
at 32768 tokens. Steps are ours: three epochs over the conversations are 3/16 of their number in
batches of 16, as many as four devices of four have. So is the row length; longer rows take memory.
"""

import pathlib

from agentjax.training import Experiment, OptimizerConfig, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("supervised.py"))
  experiment.name = "rational_rewards_student"
  experiment.data.path = "runs/parrot/student"
  experiment.engine.max_length = 8192  # a question, an answer and a critique, for ``compare``
  steps = 600
  experiment.supervised.steps = steps
  experiment.supervised.tasks_per_step = 16
  experiment.supervised.row_length = 4096
  experiment.supervised.optimizer = OptimizerConfig(
    learning_rate=1e-5,
    schedule="cosine",
    warmup_steps=steps // 20,
    final_fraction=0.0,
    weight_decay=1e-6,
  )
  return experiment
