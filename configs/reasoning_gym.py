r"""GRPO on any task of reasoning-gym (pip install 'agentjax[envs]'), without demonstrations.

  python -m agentjax.train --config=configs/reasoning_gym.py --workdir=runs/reasoning_gym
  python -m agentjax.train --config=configs/reasoning_gym.py --workdir=runs/leg \
      --config.data.source.name=leg_counting

The score is reasoning-gym's own, in 0..1. There are no worked solutions, so the warm start learns
from the answers alone; a calculator stands by for the policy to discover.
"""

from agentjax.adapters.reasoning_gym.tasks import ReasoningGymConfig
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  SupervisedStage,
)


def get_config() -> Experiment:
  return Experiment(
    name="reasoning_gym",
    model=ModelConfig(
      vocab_size=264,
      d_model=128,
      pattern="M*-M*E",
      d_mlp=256,
      mamba_heads=4,
      mamba_state=16,
      num_experts=4,
      d_expert=128,
      chunk_size=32,
    ),
    data=DataConfig(
      source=ReasoningGymConfig(name="chain_sum", parameters='{"max_terms": 3, "max_digits": 2}'),
      train_size=4000,
      test_size=128,
    ),
    reward=RewardConfig(parts=("reasoning_gym",), weights=(1.0,)),
    engine=EngineConfig(
      slots=64, max_length=320, extend_buckets=(16, 64, 256), extend_rows=(32, 16, 8)
    ),
    rollout=RolloutConfig(
      group_size=8, max_turns=4, max_tokens_per_turn=48, max_total_tokens=320, concurrency=128
    ),
    supervised=SupervisedStage(
      steps=150,
      tasks_per_step=64,
      row_length=320,
      optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=15),
    ),
    rl=RLStage(
      steps=40,
      tasks_per_step=16,
      row_length=320,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2),
    ),
    evaluation=HeldOutConfig(tasks=128, success_part="reasoning_gym"),
  )
