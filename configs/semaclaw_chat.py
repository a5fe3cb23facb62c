r"""An agent at the terminal: a calculator, files, a memory, a wiki, permissions, a bounded window.

  python -m agentjax.agent --config=configs/semaclaw_chat.py --transcript=runs/agent/talks.store \
      --agent.player=service --agent.player.endpoint.base_url=http://host:8000/v1 \
      --agent.player.endpoint.model=NAME
  python -m agentjax.agent --config=configs/semaclaw_chat.py --agent.player=checkpoint \
      --agent.player.path=FOLDER

The person at the terminal is asked before a file or a page of the wiki is written; without a
terminal nobody is there, and the call is refused. Memory and wiki stand in runs/agent. Nothing is
trained here; ``rl`` is for a run of agentjax.train.
"""

from agentjax.config import Table
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.recipes.semaclaw import AccessConfig, WindowConfig
from agentjax.recipes.semaclaw.memory import MemoryConfig
from agentjax.recipes.semaclaw.wiki import WikiConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.config import ToolLoopConfig
from agentjax.rollout.guards import GuardsConfig, PermissionConfig
from agentjax.text import ChatConfig
from agentjax.tools import ToolsConfig
from agentjax.tools.config import ToolConfig
from agentjax.training import Experiment, HeldOutConfig, RLStage


def get_config() -> Experiment:
  settings: Table[ToolConfig] = Table(
    {
      "memory": MemoryConfig(folder="runs/agent/memory"),
      "wiki": WikiConfig(folder="runs/agent/wiki"),
    }
  )
  return Experiment(
    name="semaclaw_chat",
    data=DataConfig(train_size=256, test_size=64),
    tools=ToolsConfig(names=("calculator", "files", "memory", "wiki"), settings=settings),
    chat=ChatConfig(system_prompt="You are a helpful agent. Use your tools."),
    guards=GuardsConfig(
      rules=AccessConfig(
        rules=(
          'grant agent files "command": "(list|search|view)"',
          'grant agent wiki "action": "(read|tree)"',
          "ask agent files",
          "ask agent wiki",
        )
      ),
      permissions=PermissionConfig(channels=("terminal",), timeout=600.0),
    ),
    engine=EngineConfig(slots=2, max_length=8192),
    rollout=RolloutConfig(
      max_turns=200,
      max_tokens_per_turn=1024,
      max_total_tokens=8192,
      environment_timeout=900.0,
      program=ToolLoopConfig(WindowConfig(tokens=6000)),
    ),
    rl=RLStage(steps=1, row_length=8192),
    evaluation=HeldOutConfig(tasks=0),
  )
