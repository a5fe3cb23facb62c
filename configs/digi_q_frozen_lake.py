r"""Digi-Q at toy size: a policy whose episodes are logged, and from them a better one, offline.

  pip install 'agentjax[envs]'
  python -m agentjax.train --config=configs/digi_q_frozen_lake.py --workdir=runs/logged
  python -m agentjax.recipes.digi_q.record --config=configs/digi_q_frozen_lake.py \
      --checkpoint=runs/logged --trajectories=runs/logged --output=runs/transitions \
      --record.compare='(?m)(^[PXOG_]+$\n?)+' --record.shown_turns=1
  python -m agentjax.train --config=configs/digi_q_supervised.py --workdir=runs/backbone \
      --config.data.path=runs/transitions/representation --config.start_from=runs/logged
  python -m agentjax.recipes.digi_q.learn --config=configs/digi_q_frozen_lake.py \
      --transitions=runs/transitions --backbone=runs/backbone --output=runs/critic
  python -m agentjax.recipes.digi_q.extract --config=configs/digi_q_frozen_lake.py \
      --transitions=runs/transitions --critic=runs/critic --backbone=runs/backbone \
      --policy=runs/logged --output=runs/best
  python -m agentjax.train --config=configs/digi_q_supervised.py --workdir=runs/digi_q \
      --config.data.path=runs/best --config.start_from=runs/logged
  python -m agentjax.evaluate --config=configs/digi_q_frozen_lake.py --checkpoint=runs/digi_q

The lake is not slippery, and a turn has one action. A short warm start gives a policy that knows
how to answer. The stage of reinforcement learning only logs its episodes: its learning rate is 0
but for rounding. World, model, rates and sizes are ours. No figures yet. docs/digi_q.md describes
the stages.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.tools import ToolsConfig
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  SupervisedStage,
)
from agentjax.world.text_game import TurnConfig
from agentjax.worlds.frozen_lake import FrozenLakeConfig


def get_config() -> Experiment:
  return Experiment(
    name="digi_q_frozen_lake",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    data=DataConfig(train_size=1000, test_size=128),
    world=FrozenLakeConfig(
      slippery=False,
      turns=TurnConfig(
        max_turns=8, max_actions=8, actions_per_turn=1, tags=False, format_penalty=0.0
      ),
    ),
    tools=ToolsConfig(names=()),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=64, max_length=640, chunk_tokens=8),
    rollout=RolloutConfig(
      group_size=4, max_turns=8, max_tokens_per_turn=8, max_total_tokens=640, concurrency=128
    ),
    supervised=SupervisedStage(
      steps=60,
      tasks_per_step=32,
      row_length=640,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=8,
      tasks_per_step=64,
      row_length=640,
      microbatch_rows=8,
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=1e-12),
    ),
    evaluation=HeldOutConfig(
      tasks=128, samples=4, success_part="environment", success_threshold=1.0
    ),
  )
