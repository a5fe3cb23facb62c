r"""GRPO on Spider: a policy that may run SQL on a database before it answers with a query.

  python -m agentjax.train --config=configs/sql_agent.py --config.data.path=DIR

DIR holds Spider, as published or converted (see agentjax/worlds/sql/spider.py).

Seen on 2 crowded CPU cores in 17 minutes (seed 0), on 96 of every fifth question: 0.0% of the
answers match, after the warm start (loss 7.7 -> 0.8 nats a token, one tool call an episode) and
after RL. A policy of this size shows that all of it runs and no more; --config.pretrained and
--config.tokenizer.kind=huggingface give it one that can write SQL.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
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
from agentjax.worlds.sql import SqlWorldConfig
from agentjax.worlds.sql.spider import SpiderConfig
from agentjax.worlds.sql.tool import SqlConfig


def get_config() -> Experiment:
  return Experiment(
    name="sql_agent",
    model=ModelConfig(
      d_model=96,
      pattern="M*-M*-",
      num_heads=4,
      num_kv_heads=2,
      head_dim=24,
      d_mlp=192,
      mamba_heads=4,
      mamba_head_dim=24,
      mamba_state=16,
      chunk_size=32,
      tie_embeddings=True,
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=1536),
    data=DataConfig(train_size=None, test_size=None),
    tools=ToolsConfig(names=("sql",), settings={"sql": SqlConfig(max_rows=5, max_characters=200)}),
    world=SqlWorldConfig(
      tasks=SpiderConfig(
        schema=False,
        demonstration="checked",
        shown_rows=5,
        shown_characters=200,
        split="questions",
      ),
    ),
    # 0.1 for a query that runs at all keeps groups apart while few of them are right.
    reward=RewardConfig(parts=("sql_match", "sql_runs", "sql_overlap"), weights=(1.0, 0.1, 0.0)),
    engine=EngineConfig(
      slots=32, max_length=512, extend_buckets=(16, 64, 256), extend_rows=(16, 8, 4)
    ),
    rollout=RolloutConfig(
      group_size=8, max_turns=4, max_tokens_per_turn=96, max_total_tokens=512, concurrency=64
    ),
    supervised=SupervisedStage(
      steps=160,
      tasks_per_step=16,
      row_length=1024,
      microbatch_rows=4,
      optimizer=OptimizerConfig(
        learning_rate=3e-3, schedule="cosine", warmup_steps=10, weight_decay=0.01
      ),
    ),
    rl=RLStage(
      steps=10,
      tasks_per_step=8,
      row_length=512,
      microbatch_rows=8,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=2),
    ),
    evaluation=HeldOutConfig(tasks=96, samples=0, pass_at=(), success_part="sql_match"),
  )
