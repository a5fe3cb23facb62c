r"""Self-play on Kuhn poker at toy size: the policy against itself as it was some steps ago.

  pip install 'agentjax[games]'
  python -m agentjax.train --config=configs/self_play_kuhn_poker.py --workdir=runs/kuhn
  python -m agentjax.train --config=configs/self_play_kuhn_poker.py --workdir=runs/both \
      --config.seats=

One seat is played by a frozen copy, renewed every 10 steps; the players change places from sample
to sample, so the policy learns both roles, each compared with its own. The second command lets the
policy play both seats. The warm start shows how a move is written, not how to play. All sizes and
rates are ours.

Seen on 2 CPU cores in a minute (seed 0): games that end by a move that is none are 4% in the first
ten steps, 54% in the third and 1% in the last ten. In the last fifty steps player 1 earns -.01 a
finished game and player 2 .01; perfect play is worth -1/18 and 1/18.
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
from agentjax.worlds.open_spiel import OpenSpielConfig


def get_config() -> Experiment:
  seats: Table[SeatConfig] = Table({"player_2": SnapshotSeat(every=10)})
  return Experiment(
    name="self_play_kuhn_poker",
    model=ModelConfig(
      d_model=64, pattern="*-*-", num_heads=4, num_kv_heads=2, head_dim=16, d_mlp=128
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=320),
    data=DataConfig(train_size=256, test_size=64),
    world=OpenSpielConfig(game="kuhn_poker", opening_moves=2, tags=False),
    seats=seats,
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=32, max_length=256, chunk_tokens=4),
    rollout=RolloutConfig(
      group_size=16,
      max_turns=3,
      max_tokens_per_turn=8,
      max_total_tokens=256,
      concurrency=64,
      rotate_seats="sample",
    ),
    supervised=SupervisedStage(
      steps=30,
      tasks_per_step=32,
      row_length=256,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=5),
    ),
    rl=RLStage(
      steps=100,
      tasks_per_step=8,
      row_length=256,
      microbatch_rows=8,
      objective=ObjectiveConfig(AdvantageConfig(scale="none"), PolicyLossConfig()),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=64, every=30, samples=0, success_part="environment", success_threshold=1.0
    ),
  )
