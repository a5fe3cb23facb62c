r"""Self-play on a negotiation at toy size: the policy bargains with itself as it was before.

  python -m agentjax.train --config=configs/self_play_negotiation.py --workdir=runs/deal
  python -m agentjax.train --config=configs/self_play_negotiation.py --workdir=runs/both \
      --config.seats=

One seat is played by a frozen copy, renewed every 10 steps; the players change places from sample
to sample, so the policy learns both roles, each compared with its own. The second command lets the
policy play both seats. The warm start shows how a move is written. All sizes and rates are ours. No
figures yet.
"""

from agentjax.config import Table
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.seat_config import SeatConfig, SnapshotSeat
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage
from agentjax.worlds.negotiation import NegotiationConfig


def get_config() -> Experiment:
  seats: Table[SeatConfig] = Table({"second": SnapshotSeat(every=10)})
  return Experiment(
    name="self_play_negotiation",
    model=ModelConfig(
      d_model=64, pattern="*-*-", num_heads=4, num_kv_heads=2, head_dim=16, d_mlp=128
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=320),
    data=DataConfig(train_size=256, test_size=64),
    world=NegotiationConfig(rounds=2, words=0),
    seats=seats,
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=32, max_length=512, chunk_tokens=4),
    rollout=RolloutConfig(
      group_size=16,
      max_turns=2,
      max_tokens_per_turn=24,
      max_total_tokens=512,
      concurrency=64,
      rotate_seats="sample",
    ),
    supervised=SupervisedStage(
      steps=60,
      tasks_per_step=32,
      row_length=512,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=5),
    ),
    rl=RLStage(
      steps=100,
      tasks_per_step=8,
      row_length=512,
      microbatch_rows=8,
      objective=ObjectiveConfig(AdvantageConfig(scale="none"), PolicyLossConfig()),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=64, every=30, samples=0, success_part="environment", success_threshold=0.5
    ),
  )
