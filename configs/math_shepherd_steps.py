r"""A process reward model learns from steps that completions have labelled (Math-Shepherd).

  python -m agentjax.recipes.math_shepherd.label --config=CONFIG \
      --checkpoint=runs/policy --solutions=solutions.jsonl --output=runs/steps
  python -m agentjax.train --config=configs/math_shepherd_steps.py --workdir=runs/math_shepherd
  python -m agentjax.recipes.math_shepherd.score --config=CONFIG \
      --checkpoint=runs/math_shepherd --solutions=others.jsonl --output=scores.jsonl

2312.08935: it reads a question with the steps so far and says whether the last one is right; the
loss is a language model's on that verdict. CONFIG has tasks that one turn of text solves without
tools, and ``runs/policy`` is a run of it. ``solutions.jsonl`` has the rows that
``agentjax.recipes.math_shepherd.label`` describes. Model, sizes and rates are ours, and solutions
that are longer than a row need other ones. No figures yet.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("opd_word_problems.py"))
  experiment.name = "math_shepherd_steps"
  experiment.data = DataConfig(
    path="runs/steps",
    source=JsonlConfig(name="math_shepherd", messages_field="messages", test_file=""),
  )
  experiment.evaluation.tasks = 0  # the steps come without held-out tasks
  experiment.rl = type(experiment.rl)()
  experiment.supervised.steps = 100
  experiment.supervised.optimizer = OptimizerConfig(
    learning_rate=1e-3, schedule="cosine", warmup_steps=5
  )
  return experiment
