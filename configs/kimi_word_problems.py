r"""The objective of Kimi k1.5 and K2 on word problems: log-ratios go to rewards, in squares.

  python -m agentjax.train --config=configs/kimi_word_problems.py --workdir=runs/kimi
  python -m agentjax.train --config=configs/kimi_word_problems.py --workdir=runs/kimi_muon \
      --config.rl.optimizer.name=muon --config.rl.qk_clip=100

``(r - mean r - tau log (pi / pi_old))^2`` over the episodes of a task (2501.12599, 2507.20534),
approached in two passes. The second command adds MuonClip: Muon, and bounds on the logits of
attention. World, model, warm start and rates are those of configs/quickstart.py.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment

RECIPES = (
  Recipe(
    name="Kimi K2 (squared loss)",
    paper="2501.12599, 2507.20534",
    changes=(
      "tau times the log-ratio of an episode is drawn towards its reward less the group's mean. "
      "The aim is pi_old exp((r - mean) / tau), where GRPO's is the best answer alone."
    ),
    commands=(
      "python -m agentjax.train --config=configs/kimi_word_problems.py --workdir=runs/kimi",
      "python -m agentjax.train --config=configs/kimi_word_problems.py \\\n"
      "  --workdir=runs/kimi_muon --config.rl.optimizer.name=muon --config.rl.qk_clip=100",
    ),
    tests=("tests/objectives/test_sppo.py", "tests/recipes/test_losses_of_methods.py"),
    data="word problems, generated",
    ours="tau .1; two passes",
    missing="The token budget with its penalty, the PTX loss and the falling temperature",
  ),
  Recipe(
    name="MuonClip (Kimi K2's optimiser)",
    paper="2507.20534, second-hand",
    changes=(
      "Matrices move by their orthogonalised momentum, .2 sqrt(max(n, m)) in size, all else by "
      "Adam. After the update the queries and keys of a head whose largest score on the batch was "
      "above 100 are scaled down."
    ),
    commands=(
      "python -m agentjax.train --config=configs/quickstart.py --workdir=runs/muon_clip \\\n"
      "  --config.supervised.optimizer.name=muon --config.supervised.qk_clip=100 \\\n"
      "  --config.rl.optimizer.name=muon --config.rl.qk_clip=100",
    ),
    tests=("tests/training/test_optimizer.py", "tests/training/test_qk_clip.py"),
    data="any; here word problems, generated",
    ours="rates and weight decay; where heads share a key the query takes the whole factor",
    page="models.md#training-them",
  ),
)


def change(experiment: Experiment) -> Experiment:
  """Gives it the squared loss."""
  experiment.rl.objective = preset("kimi")
  experiment.rl.epochs = 2
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "kimi_word_problems"
  return change(experiment)
