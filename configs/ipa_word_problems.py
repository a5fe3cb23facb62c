r"""IPA (ROME) on word problems: chunks as the unit, and episodes that begin at anchors.

  python -m agentjax.train --config=configs/ipa_word_problems.py --workdir=runs/ipa
  python -m agentjax.train --config=configs/ipa_word_problems.py --workdir=runs/ipa_plain \
      --config.world=question

2512.24873: returns, ratios and the filter against the sampler are those of chunks; good episodes
are learnt with weight 1, bad ones with the ratio, clipped to 0..1. So failures are paid -1: with
rewards of 1 and 0 they would not be learnt from. With one update a batch, as here, the ratio is 1;
--config.rl.minibatches=4 makes several. At first a problem is played by its worked solution up to
the last turn, then less far. All problems have a solution through tools here, of which the warm
start sees little. The rewards, gamma and the bound H are ours; model and rates are those of
configs/quickstart.py. The second command plays every problem from its beginning.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.ipa import AnchoredConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment
from agentjax.worlds.question.word_problems import WordProblemConfig


def change(experiment: Experiment) -> Experiment:
  """Gives it chunks as the unit, pay of 1 and -1, and anchors in solutions of every problem."""
  experiment.data.source = WordProblemConfig(levels=(1, 2, 3), direct_share=0.0)
  experiment.world = AnchoredConfig()
  experiment.reward = RewardConfig(
    parts=("exact_match",), weights=(), formula="1 if exact_match >= 1 else -1"
  )
  experiment.rl.objective, experiment.rl.old_log_probs = preset("ipa"), "recomputed"
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "ipa_word_problems"
  experiment.supervised.steps = 60
  return change(experiment)
