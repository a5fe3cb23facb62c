r"""Days and nights of SkillClaw on a world where a skill is worth much: a hidden number is guessed.

  python -m agentjax.recipes.skillclaw.days --config=configs/skillclaw_number_game.py \
      --models.player=agentjax.recipes.skillclaw.scripted:GuesserSeat \
      --models.writer=agentjax.recipes.skillclaw.scripted:LessonSeat \
      --skills.retrieval.show=bodies --skills.accept=0.3 --skills.gain=0.1 --skills.cases=64 \
      --library=runs/skills/library --output=runs/skills/days

Player and writer are scripted, so no model is needed. configs/skillclaw_guesser.py trains a small
policy to be the player. Days and nights train nothing; ``rl`` is for a run of agentjax.train.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.training import Experiment, HeldOutConfig, RLStage
from agentjax.worlds.number_game import NumberGameConfig


def get_config() -> Experiment:
  return Experiment(
    name="skillclaw_number_game",
    data=DataConfig(train_size=2048, test_size=512),
    world=NumberGameConfig(),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=32, max_length=640, chunk_tokens=16),
    rollout=RolloutConfig(max_turns=7, max_tokens_per_turn=48, max_total_tokens=640),
    rl=RLStage(steps=50, sampling=SamplingConfig(temperature=1.0), row_length=640),
    evaluation=HeldOutConfig(tasks=0, success_part="environment"),
  )
