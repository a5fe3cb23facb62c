r"""DAPO on Countdown at toy size: its loss, dynamic sampling, and the penalty on long answers.

  python -m agentjax.train --config=configs/dapo_countdown.py --workdir=runs/dapo

2503.14476: clip .2 / .28, token mean, no KL; groups whose rewards are all alike are given up and
replaced by others, for at most ten batches a step; the length penalty grows over a buffer before
the limit. Lengths, model, warm start and learning rates are ours. With
--config.rl.schedule.mode=one_step_off, or async, groups are replaced while updates go on.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import preset
from agentjax.recipes.scorers import OverlongConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  SupervisedStage,
)
from agentjax.training.selectors import SelectionConfig
from agentjax.worlds.countdown import CountdownConfig


def get_config() -> Experiment:
  return Experiment(
    name="dapo_countdown",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(train_size=2000, test_size=256),
    world=CountdownConfig(largest=12, tags=False),
    reward=RewardConfig(
      parts=("environment", "overlong"),
      weights=(1.0, 1.0),
      settings={"overlong": OverlongConfig(limit=24, buffer=8)},
    ),
    engine=EngineConfig(slots=64, max_length=160, chunk_tokens=8),
    rollout=RolloutConfig(
      group_size=16, max_turns=1, max_tokens_per_turn=24, max_total_tokens=160, concurrency=128
    ),
    supervised=SupervisedStage(
      steps=200,
      tasks_per_step=64,
      row_length=256,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=100,
      tasks_per_step=8,
      row_length=256,
      microbatch_rows=8,
      objective=preset("dapo"),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
      selection=SelectionConfig(rule="band", above=0.0, refill=10),
    ),
    evaluation=HeldOutConfig(
      tasks=256, every=20, samples=0, success_part="environment", success_threshold=1.0
    ),
  )
