r"""Every part of a run, at a size that learns nothing: to see that an installation works.

python -m agentjax.train --config=configs/smoke.py --workdir=runs/smoke
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.rewards import RewardConfig, SampleConfig
from agentjax.rollout import RolloutConfig
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  SupervisedStage,
)
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.worlds.question.word_problems import WordProblemConfig


def get_config() -> Experiment:
  return Experiment(
    name="smoke",
    model=ModelConfig(
      vocab_size=264,
      d_model=16,
      pattern="M*E-",
      num_heads=2,
      num_kv_heads=2,
      head_dim=8,
      d_mlp=16,
      mamba_heads=2,
      mamba_head_dim=8,
      mamba_state=4,
      num_experts=2,
      experts_per_token=1,
      d_expert=8,
      d_shared_expert=8,
      chunk_size=16,
    ),
    data=DataConfig(
      train_size=32,
      test_size=4,
      source=WordProblemConfig(levels=(1,), program_share=0.0),
    ),
    reward=RewardConfig(samples=SampleConfig(every=1, count=2, keep=2)),
    engine=EngineConfig(
      slots=4, max_length=224, chunk_tokens=8, extend_buckets=(32, 128), extend_rows=(4, 1)
    ),
    rollout=RolloutConfig(
      group_size=2, max_turns=2, max_tokens_per_turn=12, max_total_tokens=224, concurrency=4
    ),
    supervised=SupervisedStage(
      steps=2, tasks_per_step=4, row_length=256, microbatch_rows=4, router_bias_rate=1e-3
    ),
    rl=RLStage(
      steps=3,
      tasks_per_step=2,
      row_length=256,
      microbatch_rows=4,
      router_bias_rate=1e-3,
      optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
    evaluation=HeldOutConfig(tasks=2, every=1, samples=2, pass_at=(2,), resamples=20),
    checkpoint=CheckpointConfig(every=2),
  )
