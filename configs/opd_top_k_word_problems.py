r"""OPD on candidates with clipped ratios: the student of configs/opd_word_problems.py.

  make quickstart
  python -m agentjax.train --config=configs/opd_top_k_word_problems.py --workdir=runs/opd_top_k

The teacher is asked about the 16 tokens that the student finds likeliest at each place. Each of the
16 has the advantage ``w (log q - log p_old)``, w its share of their probability, and PPO's clip at
.2 with a dual clip of 3 (2604.13016 and its code). A clip acts only from the second update on a
batch on: here there are four, on a quarter of the tasks each (ours; its script makes one). Other
settings:

* --config.rl.objective.distillation.candidates=teacher, intersection, union or difference; with
  difference the code does not normalise w (candidate_loss.normalise=False);
* --config.rl.objective.distillation.candidate_loss.weights=teacher_p or none;
* --config.rl.objective.distillation.candidate_loss=none: the divergence on the candidates, whose
  gradient is that of a KL divergence and which has no clip.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  path = pathlib.Path(__file__).with_name("opd_word_problems.py")
  experiment = load_experiment(path)
  experiment.name = "opd_top_k_word_problems"
  experiment.rl.objective = preset("opd_top_k_clipped")
  experiment.rl.minibatches = 4
  return experiment
