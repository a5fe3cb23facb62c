r"""Lightning OPD with log-probs of candidates: fewer stored episodes, as each says more.

  make quickstart
  python -m agentjax.train --config=configs/opd_word_problems.py --config.rl.steps=0 \
      --config.rl.teachers= --config.rl.objective.distillation=none --workdir=runs/warm
  python -m agentjax.recipes.lightning_opd.distill --config=configs/opd_word_problems.py \
      --checkpoint=runs/warm --config.rl.objective.distillation.form=top_k \
      --output=runs/stored_top_k --tasks=512
  python -m agentjax.train --config=configs/lightning_opd_top_k_word_problems.py \
      --workdir=runs/lightning_top_k

What configs/lightning_opd_word_problems.py does with one log-prob a token (2604.13010) is done with
those of the 16 tokens that the student found likeliest when it played (ours). The loss is then
``KL(p || q)`` on these and on all else as one outcome, at contexts that the student wrote:
differentiable in p, with none of the noise of a sampled log-ratio. The update asks nothing of the
policy before, so that log-probs at its start are not computed.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  path = pathlib.Path(__file__).with_name("lightning_opd_word_problems.py")
  experiment = load_experiment(path)
  experiment.name = "lightning_opd_top_k_word_problems"
  stage = experiment.rl
  stage.objective = preset("lightning_opd_top_k")
  stage.rollouts = "runs/stored_top_k"
  stage.old_log_probs = "behaviour"
  return experiment
