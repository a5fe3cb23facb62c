r"""A small policy learns to plan web pages that score well in the browser (MM-WebAgent).

  apt-get install --no-install-recommends chromium
  python -m agentjax.train --config=configs/mm_webagent_planner.py --workdir=runs/mm_webagent

A request names colours, an image and a chart; the policy makes ten choices, of which rules make a
plan and a page; Chromium shows it, and what is measured of it is the reward. Demonstrations are
right in half of their choices. The source trains nothing: this world and all its settings are
ours. No figure of it has been measured.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import preset
from agentjax.recipes.mm_webagent import PageWorldConfig
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


def get_config() -> Experiment:
  return Experiment(
    name="mm_webagent_planner",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(train_size=2000, test_size=64),
    world=PageWorldConfig(),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=64, max_length=192, chunk_tokens=16),
    rollout=RolloutConfig(
      group_size=8, max_turns=1, max_tokens_per_turn=96, max_total_tokens=192, concurrency=64
    ),
    supervised=SupervisedStage(
      steps=300,
      tasks_per_step=32,
      row_length=512,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=60,
      tasks_per_step=8,
      row_length=512,
      microbatch_rows=8,
      objective=preset("dapo"),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=64, every=20, samples=0, success_part="environment", success_threshold=0.9
    ),
  )
