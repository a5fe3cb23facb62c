r"""ARPO on word problems: half of a group starts at the prompt, half where the policy was unsure.

  python -m agentjax.train --config=configs/arpo_word_problems.py --workdir=runs/arpo
  python -m agentjax.train --config=configs/arpo_word_problems.py --workdir=runs/aepo \
      --config.rollout.sampler.budget=entropy --config.rollout.sampler.rule=threshold \
      --config.rollout.sampler.penalty=0.05 --config.rl.objective.advantage.terms=entropy \
      --config.rl.objective.function=agentjax.recipes.credit.entropy:entropy_balanced_clip

The policy and the tasks are those of configs/quickstart.py. Sixteen episodes a task, eight of them
from the start (2507.19849); the second command has AEPO's budget, its penalty on consecutive
branches and both of its update rules (2510.14545). --config.rl.objective.advantage.terms=shared
gives shared tokens the mean advantage of their branches.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.arpo import BranchConfig
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
from agentjax.worlds.question.word_problems import WordProblemConfig


def get_config() -> Experiment:
  return Experiment(
    name="arpo_word_problems",
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
    ),
    tokenizer=TokenizerConfig(kind="sentencepiece_from_tasks", vocab_size=640),
    data=DataConfig(
      source=WordProblemConfig(levels=(1, 2, 3), direct_share=0.6),
    ),
    tools=ToolsConfig(names=("calculator", "python")),
    engine=EngineConfig(slots=64, max_length=192, chunk_tokens=16),
    rollout=RolloutConfig(
      group_size=16,
      max_turns=6,
      max_tokens_per_turn=48,
      max_total_tokens=192,
      concurrency=128,
      sampler=BranchConfig(roots=8),
    ),
    supervised=SupervisedStage(
      steps=320,
      tasks_per_step=64,
      row_length=256,
      microbatch_rows=16,
      optimizer=OptimizerConfig(
        learning_rate=3e-3, schedule="cosine", warmup_steps=20, weight_decay=0.01
      ),
    ),
    rl=RLStage(
      steps=40,
      tasks_per_step=8,
      row_length=256,
      microbatch_rows=16,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig()),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(
        learning_rate=3e-4, schedule="linear", warmup_steps=2, final_fraction=0.05
      ),
    ),
    evaluation=HeldOutConfig(tasks=128, every=10, samples=4, pass_at=(4,)),
  )
