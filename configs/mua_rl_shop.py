r"""MUA-RL in a toy shop: the policy asks a user, calls tools, and leaves a database in a state.

  python -m agentjax.train --config=configs/mua_rl_shop.py --workdir=runs/mua_rl
  python -m agentjax.check --config=configs/mua_rl_shop.py

The code of MUA-RL: groups of 8, temperature 1, KL .001, 1 for the right state with everything said.
Shop, model, warm start and rates are ours, for a machine without accelerator. The warm start is
short on purpose: a policy that never asks cannot know the order.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.mua_rl import ShopConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage


def get_config() -> Experiment:
  return Experiment(
    name="mua_rl_shop",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(train_size=4000, test_size=128),
    world=ShopConfig(),
    tools=ToolsConfig(names=()),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=32, max_length=768, chunk_tokens=8),
    rollout=RolloutConfig(
      group_size=8, max_turns=6, max_tokens_per_turn=64, max_total_tokens=768, concurrency=64
    ),
    supervised=SupervisedStage(
      steps=100,
      tasks_per_step=32,
      row_length=768,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=60,
      tasks_per_step=8,
      row_length=768,
      microbatch_rows=8,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(kl_coefficient=1e-3)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=128, every=20, samples=0, success_part="environment", success_threshold=1.0
    ),
  )
