r"""What comes before the reinforcement learning of the interplay study: up to four operations.

  python -m agentjax.train --config=configs/interplay.py --workdir=runs/pretrained
  python -m agentjax.stages --stages=configs/stages/interplay.py --workdir=runs/interplay

The second command goes on with reinforcement learning on other problems. 2512.07783: GRPO with
groups of 6 and a KL of .001, .2 for a right answer and .8 for its steps. Problems, model and rates
are ours, for a machine without accelerator; the paper's model has 100M parameters.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.interplay import GraphConfig, GraphProblemConfig
from agentjax.rewards import RewardConfig
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage


def get_config() -> Experiment:
  return Experiment(
    name="interplay",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(test_size=192, source=GraphProblemConfig()),
    tools=ToolsConfig(names=()),
    reward=RewardConfig(
      parts=("right", "process"),
      weights=(),
      formula="0.2 * right + 0.8 * process if right >= 1 else 0",
      settings={
        "right": ScorerConfig.from_name("agentjax.recipes.interplay.graph:right", "right"),
        "process": GraphConfig(),
      },
    ),
    engine=EngineConfig(slots=64, max_length=320, chunk_tokens=16),
    rollout=RolloutConfig(
      group_size=6,
      max_turns=1,
      max_tokens_per_turn=160,
      max_total_tokens=320,
      concurrency=128,
      answer="text",
    ),
    supervised=SupervisedStage(
      steps=600,
      tasks_per_step=64,
      row_length=320,
      microbatch_rows=16,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=20),
    ),
    rl=RLStage(
      steps=0,
      tasks_per_step=16,
      row_length=320,
      microbatch_rows=16,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(kl_coefficient=1e-3)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=192, every=20, samples=4, pass_at=(4,), success_part="right", success_threshold=1.0
    ),
  )
