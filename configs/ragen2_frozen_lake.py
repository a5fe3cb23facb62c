r"""SNR-aware filtering on FrozenLake at toy size, with mutual information as the witness (RAGEN-2).

  pip install 'agentjax[envs]'
  python -m agentjax.train --config=configs/ragen2_frozen_lake.py --workdir=runs/ragen2
  python -m agentjax.train --config=configs/ragen2_frozen_lake.py --workdir=runs/unfiltered \
      --config.rl.selection.rule=all

2604.06268: of the sampled groups those are kept that hold nine tenths of the spread of rewards, in
its recommended linear form. information/first_turn_per_token near 0 with an entropy that is not is
template collapse. Where the ice slips, chance itself makes rewards spread: look at
selection/score_variation, and compare with --config.world.slippery=False.
Model, warm start, learning rates and number of steps are ours.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
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
from agentjax.training.diagnostics import DiagnosticsConfig
from agentjax.training.selectors import SelectionConfig
from agentjax.worlds.frozen_lake import FrozenLakeConfig


def get_config() -> Experiment:
  return Experiment(
    name="ragen2_frozen_lake",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(train_size=2000, test_size=128),
    world=FrozenLakeConfig(),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=64, max_length=512, chunk_tokens=8),
    rollout=RolloutConfig(
      group_size=16, max_turns=5, max_tokens_per_turn=32, max_total_tokens=512, concurrency=128
    ),
    supervised=SupervisedStage(
      steps=100,
      tasks_per_step=32,
      row_length=512,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=200,
      tasks_per_step=8,
      row_length=512,
      microbatch_rows=8,
      objective=ObjectiveConfig(
        AdvantageConfig(), PolicyLossConfig(clip_high=0.28, entropy_coefficient=0.001)
      ),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
      selection=SelectionConfig(rule="top_p", share=0.9),
      diagnostics=DiagnosticsConfig(information_every=5),
    ),
    evaluation=HeldOutConfig(
      tasks=128, every=20, samples=0, success_part="environment", success_threshold=1.0
    ),
  )
