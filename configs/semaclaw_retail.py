r"""A team at a service desk learns, each seat from its own reward: orchestrator, reader, clerk.

  python -m agentjax.train --config=configs/semaclaw_retail.py --workdir=runs/retail_team \
      --config.data.path=DIR --config.pretrained=FOLDER --config.tokenizer.kind=huggingface

DIR is tau-bench's folder "retail", FOLDER a model that can call tools, such as Qwen3-0.6B. The
reader has the tools that read records, the clerk those that change them. All are paid for the
outcome; each also for its own accepted work, and the clerk for calls that belong to the solution.
One policy plays all seats; --config.seats.clerk=trained gives the clerk one of its own. The figures
are ours. No figures of a trained team yet.
"""

from agentjax.config import Table
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.semaclaw import TeamWorldConfig, WindowConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.config import ToolLoopConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage
from agentjax.worlds.retail import RetailConfig


def get_config() -> Experiment:
  team = TeamWorldConfig(
    inner=RetailConfig(),
    workers=Table({"reader": "finds and reads records", "clerk": "changes records"}),
    tools=Table(
      {
        "reader": ("find_*", "get_*", "list_*", "calculate"),
        "clerk": ("get_*", "cancel_*", "exchange_*", "modify_*", "return_*", "transfer_*"),
      }
    ),
    turns=48,
    task_turns=16,
    refused=0.1,
  )
  return Experiment(
    name="semaclaw_retail",
    data=DataConfig(train_size=None, test_size=None),
    tools=ToolsConfig(names=()),
    world=team,
    reward=RewardConfig(parts=("environment", "work", "right_writes"), weights=(1.0, 0.1, 0.2)),
    engine=EngineConfig(slots=32, max_length=16384),
    rollout=RolloutConfig(
      group_size=8,
      max_turns=16,
      max_tokens_per_turn=1024,
      max_total_tokens=16384,
      program=ToolLoopConfig(WindowConfig()),
    ),
    rl=RLStage(
      steps=100,
      tasks_per_step=8,
      row_length=16384,
      microbatch_rows=1,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_high=0.28)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(tasks=32, samples=0, pass_at=(), success_part="environment"),
  )
