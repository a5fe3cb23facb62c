r"""RL for machine-learning engineering at toy size: turns count by the time that they take.

  python -m agentjax.train --config=configs/rl4mle.py --workdir=runs/rl4mle
  python -m agentjax.train --config=configs/rl4mle.py --workdir=runs/ppo \
      --config.rl.objective.advantage.terms= --config.rollout.sampler=independent

2509.01684, second-hand: asynchronous PPO whose gradient weighs a turn by the seconds of its
programs, and partial credit for milestones, which the host measures. Half of the episodes begin
from a program of another of their group, with its score, and are asked for a better one. Programs
take some hundredths of a second here, so that a turn counts as .01 s at least. The second command
is PPO.
Data sets and milestones are those of the world "mle"; model, warm start and rates are ours, for a
machine without accelerator.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import preset
from agentjax.recipes.credit import DurationTerm
from agentjax.recipes.rl4mle import ImproveConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage
from agentjax.worlds.mle import MleWorldConfig


def get_config() -> Experiment:
  objective = preset("ppo")
  objective.advantage.terms = (DurationTerm(),)
  return Experiment(
    name="rl4mle",
    model=ModelConfig(
      d_model=128, pattern="*-*-*-", num_heads=4, num_kv_heads=2, head_dim=32, d_mlp=256
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=640),
    data=DataConfig(train_size=256, test_size=32),
    world=MleWorldConfig(),
    reward=RewardConfig(
      parts=("mle_submitted", "mle_loaded", "mle_valid", "mle_beats_constant", "mle_score"),
      weights=(0.05, 0.05, 0.1, 0.3, 0.5),
    ),
    engine=EngineConfig(slots=16, max_length=2048, chunk_tokens=16),
    rollout=RolloutConfig(
      group_size=4,
      max_turns=3,
      max_tokens_per_turn=512,
      max_total_tokens=2048,
      concurrency=16,
      sampler=ImproveConfig(part="mle_score", most_characters=1200),
    ),
    supervised=SupervisedStage(
      steps=200,
      tasks_per_step=16,
      row_length=2048,
      microbatch_rows=2,
      optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=10),
    ),
    rl=RLStage(
      steps=50,
      tasks_per_step=4,
      row_length=2048,
      microbatch_rows=2,
      objective=objective,
      schedule=ScheduleConfig(mode="async", staleness=1),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(
      tasks=32, every=25, samples=0, success_part="mle_score", success_threshold=1.0
    ),
  )
