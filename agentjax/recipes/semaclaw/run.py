r"""A team works on a goal: an orchestrator writes a graph of tasks, workers do them at once.

  python -m agentjax.recipes.semaclaw.run --config=configs/semaclaw_team.py --output=runs/team \
      --goal="What is (2 + 3) * (4 + 5)?" --team.player=service \
      --team.player.endpoint.base_url=http://host:8000/v1 --team.player.endpoint.model=NAME

``config.world`` names the team (``agentjax.recipes.semaclaw:TeamWorldConfig``): workers, their
tools and permissions. ``--team.seats.NAME`` gives an agent another player, ``--team.personas.NAME``
adds a persona, which does up to five tasks at once and is called ``persona:NAME`` in the graph.

``--output`` then holds ``board.json``, the graph with its results, and ``episodes.store``, all
conversations as trajectories. The same command goes on where its process was stopped. 2604.11548.
"""

from __future__ import annotations

import asyncio

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.semaclaw.live import LiveTeam, TaskFailedError
from agentjax.recipes.semaclaw.players import PlayersConfig
from agentjax.training.flags import define_config_flag, define_settings_flag
from agentjax.training.progress import print_line, print_table

_CONFIG = define_config_flag()
_TEAM = define_settings_flag("team", PlayersConfig(), "Who plays.")
_GOAL = flags.DEFINE_string("goal", None, "What the team is to do.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  for flag in (_GOAL, _OUTPUT):
    if not flag.value:
      raise ConfigError(f"--{flag.name}={flag.value!r}; allowed: a text.")
  _TEAM.value.validate("team")
  team = LiveTeam(
    _CONFIG.value, _TEAM.value.all, _OUTPUT.value, personas=dict(_TEAM.value.personas)
  )

  async def pursue() -> str:
    async with team:
      return await team.pursue(_GOAL.value)

  try:
    answer = asyncio.run(pursue())
  except TaskFailedError as error:
    raise ConfigError(f"{error}; --output={_OUTPUT.value} holds what was done so far.") from error
  console = Console()
  rows = [
    (task.id, task.agent, task.status, ", ".join(task.depends_on), task.result[:200])
    for task in team.scheduler.board.tasks
  ]
  print_table(console, _OUTPUT.value, ("task", "agent", "status", "after", "result"), rows)
  print_line(console, answer)


if __name__ == "__main__":
  main(run)
