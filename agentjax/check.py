"""Checks a config's rewards: worked solutions must be paid, empty answers and cheats must not.

  python -m agentjax.check --config=configs/my_code_run.py --tasks=16

Plays each task's worked solution, an empty answer, and the cheats of the world (``World.cheats``)
through the config's own environment and reward graph. Chance is switched off in games. Ends with 1
if an attempt is paid wrongly. Rewards that pay for form fail this check; ``--at_most=0.1`` allows
so much.
"""

from __future__ import annotations

import asyncio
import sys

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.training.flags import define_config_flag

_CONFIG = define_config_flag()
_TASKS = flags.DEFINE_integer("tasks", 8, "Training tasks to check, from the start.", lower_bound=1)
_AT_MOST = flags.DEFINE_float("at_most", 0.0, "What an empty answer or a cheat may earn.")


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.training.progress import print_line, print_table
  from agentjax.training.reward_gates import check_experiment

  experiment = _CONFIG.value
  try:
    results = asyncio.run(check_experiment(experiment, tasks=_TASKS.value, at_most=_AT_MOST.value))
  except ValueError as error:
    raise ConfigError(str(error)) from error
  console = Console()
  rows = []
  for attempt in dict.fromkeys(r.attempt for r in results):
    mine = [r for r in results if r.attempt == attempt]
    rows.append((attempt, str(len(mine)), str(sum(r.held for r in mine))))
  print_table(console, experiment.name, ("attempt", "tasks", "as it should be"), rows)
  broken = [r for r in results if not r.held]
  for r in broken:
    print_line(console, f"{r.source} {r.task_id}, {r.attempt}: {r.reward.value} {r.detail}")
  if broken:
    sys.exit(1)


if __name__ == "__main__":
  main(run)
