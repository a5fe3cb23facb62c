r"""GRPO with a calculator on GSM8K: the real train and test files, from a small policy of ours.

  python -m agentjax.train --config=configs/gsm8k_calculator.py --config.data.path=DIR \
      --workdir=runs/gsm8k

DIR holds GSM8K's train.jsonl and test.jsonl. The calculator annotations of the worked solutions
become tool calls, and their results become observations.

Seen on 2 shared CPU cores in 20 minutes (seed 0), exact match on the 1,319 test problems: 1.0%
[0.5, 1.5] after the warm start, 0.9% [0.5, 1.4] after RL. A policy of this size learns the form of
a solution and is rewarded too rarely to learn more; --config.start_from gives it a better start.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import (
  Experiment,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  SupervisedStage,
)
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.worlds.question.gsm8k import Gsm8kConfig


def get_config() -> Experiment:
  return Experiment(
    name="gsm8k_calculator",
    model=ModelConfig(
      d_model=128,
      pattern="M*-M*E",
      num_heads=4,
      num_kv_heads=2,
      head_dim=32,
      d_mlp=256,
      mamba_heads=4,
      mamba_head_dim=32,
      mamba_state=16,
      num_experts=4,
      experts_per_token=2,
      d_expert=128,
      d_shared_expert=128,
      chunk_size=32,
      tie_embeddings=True,
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=2048),
    data=DataConfig(source=Gsm8kConfig(), train_size=None, test_size=None),
    tools=ToolsConfig(names=("calculator",)),
    engine=EngineConfig(
      slots=64, max_length=640, extend_buckets=(16, 64, 256), extend_rows=(32, 8, 4)
    ),
    rollout=RolloutConfig(
      group_size=8, max_turns=12, max_tokens_per_turn=96, max_total_tokens=640, concurrency=128
    ),
    supervised=SupervisedStage(
      steps=250,
      tasks_per_step=16,
      row_length=1024,
      microbatch_rows=4,
      balance_coefficient=1e-4,
      optimizer=OptimizerConfig(
        learning_rate=3e-3, schedule="cosine", warmup_steps=25, weight_decay=0.01
      ),
    ),
    rl=RLStage(
      steps=20,
      tasks_per_step=16,
      row_length=1024,
      microbatch_rows=4,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=3),
    ),
    evaluation=HeldOutConfig(tasks=1319, samples=0, pass_at=()),
    checkpoint=CheckpointConfig(every=100),
  )
