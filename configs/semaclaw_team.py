r"""A team for a goal: a counter and a checker with a calculator.

  python -m agentjax.recipes.semaclaw.run --config=configs/semaclaw_team.py --output=runs/team \
      --goal="What is (2 + 3) * (4 + 5)?" \
      --team.player=agentjax.recipes.semaclaw.scripted:CounterSeat

The scripted player needs no model. With "service" or "checkpoint" the same team is played by one.
Nothing is trained here; ``rl`` is for a run of agentjax.train. Seen: "It is 45."
"""

from agentjax.config import Table
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.recipes.semaclaw import TeamWorldConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, RLStage


def get_config() -> Experiment:
  return Experiment(
    name="semaclaw_team",
    data=DataConfig(train_size=256, test_size=64),
    tools=ToolsConfig(names=("calculator",)),
    world=TeamWorldConfig(
      workers=Table({"counter": "does one sum", "checker": "joins results"}), wait="task"
    ),
    reward=RewardConfig(parts=("exact_match", "work"), weights=(1.0, 0.2)),
    engine=EngineConfig(slots=8, max_length=8192),
    rollout=RolloutConfig(max_turns=16, max_tokens_per_turn=1024, max_total_tokens=8192),
    rl=RLStage(steps=50, row_length=8192),
    evaluation=HeldOutConfig(tasks=0),
  )
