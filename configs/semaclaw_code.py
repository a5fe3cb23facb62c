r"""A team writes functions: a coder and a reviewer, each paid for the code that it hands in.

  python -m agentjax.train --config=configs/semaclaw_code.py --workdir=runs/code_team \
      --config.data.path=DIR --config.pretrained=FOLDER --config.tokenizer.kind=huggingface

DIR holds MBPP's mbpp.jsonl, FOLDER a model that can write Python. The part "hand_in" runs the
hidden tests on the last code that a worker handed in, and for the orchestrator on the team's
answer. The figures are ours. No figures of a trained team yet.
"""

from agentjax.adapters.unit_tests.scorer import UnitTestConfig
from agentjax.config import Table
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.semaclaw import HandInConfig, TeamWorldConfig, WindowConfig
from agentjax.rewards import RewardConfig
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.config import ToolLoopConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage
from agentjax.worlds.code import CodeWorldConfig
from agentjax.worlds.code.sources import CodeTasksConfig


def get_config() -> Experiment:
  parts: Table[ScorerConfig] = Table(
    {"hand_in": HandInConfig(inner=UnitTestConfig(credit="fraction"))}
  )
  return Experiment(
    name="semaclaw_code",
    data=DataConfig(train_size=None, test_size=None),
    tools=ToolsConfig(names=("python",)),
    world=TeamWorldConfig(
      inner=CodeWorldConfig(tasks=CodeTasksConfig()),
      workers=Table({"coder": "writes Python functions", "reviewer": "tests and mends code"}),
      turns=24,
      task_turns=6,
      refused=0.1,
    ),
    reward=RewardConfig(parts=("hand_in", "work"), weights=(1.0, 0.1), settings=parts),
    engine=EngineConfig(slots=32, max_length=8192),
    rollout=RolloutConfig(
      group_size=8,
      max_turns=12,
      max_tokens_per_turn=1024,
      max_total_tokens=8192,
      program=ToolLoopConfig(WindowConfig()),
    ),
    rl=RLStage(
      steps=100,
      tasks_per_step=8,
      row_length=8192,
      microbatch_rows=1,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(tasks=32, samples=0, pass_at=(), success_part="hand_in"),
  )
