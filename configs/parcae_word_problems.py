r"""A small Parcae on word problems: the middle layer runs four times, over sampled depths at first.

  python -m agentjax.train --config=configs/parcae_word_problems.py --workdir=runs/parcae

2604.12946 is about pretraining. The warm start trains as it does: each sequence draws its number of
iterations and the states that they start from, anew in every update, and gradients go through the
last half of the mean. Reinforcement learning samples and scores at the mean depth, from states that
are a function of the sequence, so that sampler and trainer agree. One layer each before, in and
after the loop; world, room, warm start and learning rates are those of configs/quickstart.py.
"""

import pathlib

from agentjax.models import LoopConfig, ModelConfig
from agentjax.recipes import Recipe
from agentjax.training import Experiment, load_experiment

_TRAIN = "python -m agentjax.train --config=configs/parcae_word_problems.py"
RECIPES = (
  Recipe(
    name="Parcae",
    paper="2604.12946, and its code, sandyresearch/parcae",
    changes=(
      "A model: its middle layers run T times on a state with a decay below 1 in every channel, T "
      "drawn for each sequence in supervised training, from a start state drawn for each token of "
      "each sequence. The presets parcae_140m, parcae_370m, parcae_770m and parcae_1_3b have the "
      "published sizes."
    ),
    commands=(
      f"{_TRAIN} --workdir=runs/parcae",
      f"{_TRAIN} --workdir=runs/parcae_deep --config.model.loop.eval_depth=8",
      f"{_TRAIN} --workdir=runs/parcae_place --config.model.loop.start_by=place",
    ),
    tests=(
      "tests/models/test_loop.py",
      "tests/engine/test_loops.py",
      "tests/models/test_presets.py",
    ),
    data="word problems, generated",
    ours="reinforcement learning, at the mean depth; what start states are drawn by in sampling "
    "and scoring; widths and depths at toy size",
    missing="pretraining on FineWeb-Edu and its optimiser's groups; the weights published",
    page="models.md",
  ),
)


def looped(experiment: Experiment) -> Experiment:
  """Gives it a looped policy, and nothing of a mixture of experts."""
  experiment.model = ModelConfig(
    d_model=128,
    pattern="*-V-*-",
    tie_embeddings=True,
    init_scale=0.4**0.5,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    rope_theta=50_000.0,
    qk_norm=True,
    d_mlp=512,
    loop=LoopConfig(prelude=2, coda=2, mean_depth=4),
  )
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "parcae_word_problems"
  return looped(experiment)
