r"""Lightning OPD: episodes played once, scored once by the teacher, then trained on without either.

  make quickstart
  python -m agentjax.train --config=configs/opd_word_problems.py --config.rl.steps=0 \
      --config.rl.teachers= --config.rl.objective.distillation=none --workdir=runs/warm
  python -m agentjax.recipes.lightning_opd.distill --config=configs/opd_word_problems.py \
      --checkpoint=runs/warm --output=runs/stored --tasks=1024
  python -m agentjax.train --config=configs/lightning_opd_word_problems.py --workdir=runs/lightning

The objective is that of configs/opd_word_problems.py with ``y ~ pi_ref`` instead of ``y ~ p``
(2604.13010): ``E_{y ~ pi_ref} sum_t sg[log q(y_t) - log p(y_t)] log p(y_t)``, where log q is frozen
and log p is computed anew at every step. Their gradients differ by ``Cov(w, f)``, with w the ratio
of the two sampling policies, which keeps the student near pi_ref: the fewer the steps, the better.
``mismatch/kl`` is how far it has moved, and ``rl.stop_above_kl`` a bound on that, to stop or play
again. The clip bound tau of the paper is not published and its configs set none;
``rl.objective.distillation.clip`` is there for one.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("opd_word_problems.py"))
  experiment.name = "lightning_opd_word_problems"
  experiment.supervised.steps = 0
  experiment.start_from = "runs/warm"
  stage = experiment.rl
  stage.objective = preset("lightning_opd")
  stage.teachers = ()
  stage.rollouts = "runs/stored"
  stage.old_log_probs = "recomputed"
  stage.mismatch_alarm = 20.0  # the policy is meant to leave the one that sampled
  return experiment
