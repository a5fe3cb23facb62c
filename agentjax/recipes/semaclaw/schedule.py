r"""Jobs at their times: notices, programs, and agents of a team, each in a conversation of its own.

  python -m agentjax.recipes.semaclaw.schedule --jobs=jobs.json --config=configs/semaclaw_team.py \
      --output=runs/jobs --team.player=service --team.player.endpoint.base_url=... [--once]

``--jobs`` is a list of objects:

  {"name": "hello", "every": 3600, "mode": "notify", "text": "an hour is over"}
  {"name": "space", "at": "08:30", "mode": "script", "command": ["df", "-h"]}
  {"name": "sum", "every": 60, "mode": "agent", "agent": "counter", "prompt": "Count 2 + 3"}
  {"name": "look", "at": "08:30", "mode": "script-agent", "command": ["df", "-h"],
   "agent": "checker", "prompt": "Is there room?", "session": "group"}

``every`` counts seconds from the last run, ``at`` is a time of day here. With the session "group"
an agent is shown what its job said last; "isolated", the default, shows nothing. Commands run on
this machine, as its user, outside every sandbox, without a shell; what one leaves running is ended
with it. A job waits for no other, and is not started while it runs.

Of a command that fails, people and its agent read the exit status or signal and the end of its
errors.

A job counts as run when it begins: if the process ends in it, it is not repeated, and the next
process tells which jobs had not ended. Times that passed while none ran are made up for
once, from when a job was first seen. ``--once`` runs what is due and ends. 2604.11548.
"""

from __future__ import annotations

import asyncio

from absl import flags

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.recipes.semaclaw.jobs import Schedule, read_jobs
from agentjax.recipes.semaclaw.live import LiveTeam
from agentjax.recipes.semaclaw.players import PlayersConfig
from agentjax.training.flags import define_config_flag, define_settings_flag

_CONFIG = define_config_flag()
_TEAM = define_settings_flag("team", PlayersConfig(), "Who plays.")
_JOBS = flags.DEFINE_string("jobs", None, "JSON file of the jobs.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_ONCE = flags.DEFINE_bool("once", False, "Run what is due and end.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  jobs = read_jobs(_JOBS.value)
  if not jobs:
    raise ConfigError(f"--jobs={_JOBS.value} has no job.")
  _TEAM.value.validate("team")
  team = LiveTeam(
    _CONFIG.value, _TEAM.value.all, _OUTPUT.value, personas=dict(_TEAM.value.personas)
  )

  async def keep() -> None:
    schedule = Schedule(jobs, team, _OUTPUT.value)
    schedule.end_interrupted()
    async with team:
      await (schedule.run_due() if _ONCE.value else schedule.run_forever())

  asyncio.run(keep())


if __name__ == "__main__":
  main(run)
