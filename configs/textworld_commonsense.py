r"""GRPO on TextWorld Commonsense: put what lies about where it belongs, a command a turn.

  python -m agentjax.check --config=configs/textworld_commonsense.py --config.data.path=DIR
  python -m agentjax.train --config=configs/textworld_commonsense.py --config.data.path=DIR \
      --workdir=runs/textworld

DIR is the folder of the 45 clean-up games of TextWorld Commonsense (2010.03790), unpacked or as an
archive: five a level for training and, of other things, five for testing. A turn is paid the share
of the points that it earns. Model, warm start on first commands and rates are ours, for a machine
without accelerator. No figures yet.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage
from agentjax.worlds.textworld import TextWorldConfig


def get_config() -> Experiment:
  return Experiment(
    name="textworld_commonsense",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(train_size=None, test_size=None),
    world=TextWorldConfig(levels=("easy",), max_turns=8),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=32, max_length=3072, chunk_tokens=8),
    rollout=RolloutConfig(
      group_size=8, max_turns=8, max_tokens_per_turn=32, max_total_tokens=3072, concurrency=64
    ),
    supervised=SupervisedStage(
      steps=100,
      tasks_per_step=5,
      row_length=3072,
      microbatch_rows=2,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=100,
      tasks_per_step=5,
      row_length=3072,
      microbatch_rows=2,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=5, every=20, samples=0, success_part="environment", success_threshold=1.0
    ),
  )
