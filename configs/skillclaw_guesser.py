r"""A small policy learns to do what a skill in its prompt says, for days and nights of SkillClaw.

  python -m agentjax.train --config=configs/skillclaw_guesser.py --workdir=runs/guesser
  python -m agentjax.recipes.skillclaw.days --config=configs/skillclaw_number_game.py \
      --models.player=checkpoint --models.player.path=runs/guesser \
      --models.writer=agentjax.recipes.skillclaw.scripted:LessonSeat \
      --skills.retrieval.show=bodies --skills.accept=0.3 --skills.gain=0.1 --skills.cases=64 \
      --library=runs/guesser_days/library --output=runs/guesser_days

Half of the demonstrations show a skill and follow it, the others follow a habit. The habits are
mostly bad: the policy knows the best way to guess, but does not take it until a night has published
a skill that says so. No figure of it has been measured.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.models import ModelConfig
from agentjax.recipes.skillclaw.scripted import GuesserDemonstrations
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, OptimizerConfig, SupervisedStage, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("skillclaw_number_game.py"))
  experiment.name = "skillclaw_guesser"
  experiment.model = ModelConfig(
    d_model=128, pattern="*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
  )
  experiment.tokenizer = TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=400)
  experiment.data = DataConfig(source=GuesserDemonstrations(), train_size=8192, test_size=256)
  experiment.rl.steps = 0
  experiment.supervised = SupervisedStage(
    steps=300,
    tasks_per_step=32,
    row_length=384,
    microbatch_rows=8,
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=20),
  )
  return experiment
