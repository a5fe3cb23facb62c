r"""StarPO-S on Sokoban at toy size: uncertain tasks only, clip-higher, no KL, a critic over turns.

  python -m agentjax.train --config=configs/ragen_sokoban.py --workdir=runs/ragen
  python -m agentjax.train --config=configs/ragen_sokoban.py --workdir=runs/starpo \
      --config.rl.selection.rule=all --config.rl.objective.policy_loss.clip_high=0.2

The recipe is RAGEN's (2504.20073): 8 tasks of 16 episodes, five turns of up to five actions, the
quarter of the tasks whose rewards spread most, bounds .2 / .28, entropy bonus .001. Each turn is
paid what the game paid it, by GAE over turns and then over tokens. The policy is a small one that
is first shown how actions are written; model, warm start, learning rates and number of steps are
ours. --config.world.levels=FILE plays boxoban's levels.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import preset
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
from agentjax.world import TurnConfig
from agentjax.worlds.sokoban import SokobanConfig


def get_config() -> Experiment:
  objective = preset("ragen")
  objective.advantage.turn_rewards = ("environment",)
  objective.policy_loss.entropy_coefficient = 0.001
  return Experiment(
    name="ragen_sokoban",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=384),
    data=DataConfig(train_size=2000, test_size=128),
    world=SokobanConfig(turns=TurnConfig(max_turns=5, max_actions=10, actions_per_turn=5)),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(slots=64, max_length=640, chunk_tokens=8),
    rollout=RolloutConfig(
      group_size=16, max_turns=5, max_tokens_per_turn=32, max_total_tokens=640, concurrency=128
    ),
    supervised=SupervisedStage(
      steps=100,
      tasks_per_step=32,
      row_length=640,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=200,
      tasks_per_step=8,
      row_length=640,
      microbatch_rows=8,
      objective=objective,
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
      selection=SelectionConfig(rule="top_k", share=0.25, keep_zeros=True),
      diagnostics=DiagnosticsConfig(information_every=5),
    ),
    evaluation=HeldOutConfig(
      tasks=128, every=20, samples=0, success_part="environment", success_threshold=10.0
    ),
  )
