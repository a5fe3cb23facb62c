r"""IPA (ROME) on Sokoban at toy size: chunks from one answer of the game to the next are the unit.

  python -m agentjax.train --config=configs/ipa_sokoban.py --workdir=runs/ipa
  python -m agentjax.train --config=configs/ipa_sokoban.py --workdir=runs/grpo \
      --config.rl.objective=grpo

2512.24873: returns, ratios and the filter against the sampler are those of chunks; good episodes
are learnt with weight 1, bad ones with the ratio, clipped to 0..1. Gamma and the bound H are ours.
Game, model, warm start and rates are those of configs/ragen_sokoban.py.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment
from agentjax.training.selectors import SelectionConfig

RECIPES = (
  Recipe(
    name="ROME (IPA)",
    paper="2512.24873, notes, and ROLL's code",
    changes=(
      "Chunks, from one answer of the environment to the next, are the unit of returns, ratios "
      "and the filter against the sampler. A chunk is worth less the further it is from the end; "
      "good episodes have weight 1, bad ones the ratio within 0..1."
    ),
    commands=("python -m agentjax.train --config=configs/ipa_sokoban.py --workdir=runs/ipa",),
    tests=("tests/objectives/test_nine_losses.py", "tests/objectives/test_returns.py"),
    data="Sokoban, generated",
    ours="gamma .95 and H 1.2. Episodes that begin at anchors of an expert's are not part of it",
    page="objectives.md#methods",
  ),
)


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("ragen_sokoban.py"))
  experiment.name = "ipa_sokoban"
  stage = experiment.rl
  stage.objective, stage.old_log_probs = preset("ipa"), "recomputed"
  stage.selection = SelectionConfig()
  return experiment
