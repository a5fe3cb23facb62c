r"""One domain of LongCat-Flash-Thinking, from the policy of the quickstart.

  make quickstart
  python -m agentjax.train --config=configs/longcat_domain.py --workdir=runs/story \
      --config.data.source.program_share=0
  python -m agentjax.train --config=configs/longcat_domain.py --workdir=runs/program \
      --config.data.source.program_share=1

2509.18883: domains are trained side by side and fused (``agentjax.recipes.longcat.fuse``). Loss and
constants are those of the preset "longcat", whose clip bounds act only with several updates a batch
(--config.rl.minibatches=4; here there is one); groups without a difference are not trained on, and
neither are episodes that were cut off, unless they repeat themselves. The paper does not say when
an episode does: 10 runs of 20 tokens are ours (rl.weights.repetitions, repeated_tokens).
"""

import pathlib

from agentjax.objectives import preset
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, load_experiment
from agentjax.training.selectors import SelectionConfig
from agentjax.trajectory.weights import WeightConfig


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "longcat_domain"
  experiment.start_from = "runs/quickstart"
  experiment.tokenizer = TokenizerConfig(
    kind="sentencepiece", path="runs/quickstart/tokenizer.model"
  )
  experiment.model.vocab_size = 640  # that of the vocabulary
  experiment.supervised.steps = 0
  stage = experiment.rl
  stage.objective, stage.old_log_probs = preset("longcat"), "recomputed"
  stage.selection = SelectionConfig(rule="band", above=0.0, refill=2)
  stage.weights = WeightConfig(rules=("role", "incomplete_unless_repetitive"))
  return experiment
