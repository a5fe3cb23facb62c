r"""On-policy distillation: a small student learns the word problems from the policy of quickstart.

  make quickstart
  python -m agentjax.train --config=configs/opd_word_problems.py --workdir=runs/opd

With ``p`` the student, ``q`` the teacher and ``y ~ p``, every token's advantage is
``sg[log q(y_t) - log p(y_t)]`` in PPO's loss (2604.13016): the one-sample estimate of
``-grad KL(p || q)``. No reward is looked at. The other forms are settings:

* exact KL over the vocabulary (2306.13649), ``--config.rl.objective.distillation.form=full``;
* TIP (2604.14084), ``form=full`` and ``--config.rl.objective.distillation.keep=0.5``: of all tokens
  the half with the highest ``h + d - h d``, h and d the min-max scaled entropy of the student and
  its divergence from the teacher;
* KL on the student's 16 likeliest tokens, ``form=top_k``.

The student is a third as wide and only attends. Its warm start are the demonstrations that the
teacher was trained on.
"""

import pathlib

from agentjax.models import ModelConfig
from agentjax.objectives import preset
from agentjax.signals.teacher import TeacherConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "opd_word_problems"
  experiment.model = ModelConfig(
    d_model=48, pattern="*-*-", num_heads=4, num_kv_heads=2, head_dim=12, d_mlp=192
  )
  experiment.rollout.group_size = 1
  experiment.supervised.steps = 80
  stage = experiment.rl
  stage.tasks_per_step = 64
  stage.objective = preset("opd")
  stage.teachers = (TeacherConfig("runs/quickstart"),)
  stage.optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=5)
  return experiment
