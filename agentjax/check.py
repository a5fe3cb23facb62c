"""Checks that a config's rewards are earned: references are paid, empty answers and cheats not.

  python -m agentjax.check --config=configs/my_code_run.py --tasks=16

Plays the demonstration of each task, an empty answer, and, where code is written, programs that
ask for the reward without earning it, through the config's own environment and reward graph. Ends
with 1 where one gate did not hold.
"""

from __future__ import annotations

import asyncio
import sys

from absl import flags
from rich.console import Console

from agentjax.config import ConfigError
from agentjax.training.flags import define_config_flag, main

_CONFIG = define_config_flag()
_TASKS = flags.DEFINE_integer("tasks", 8, "Training tasks to check, from the start.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.rollout.integrity import GateResult, check_environment, code_cheats
  from agentjax.training.experiment import resolve
  from agentjax.training.parts import Extensions, build_parts
  from agentjax.training.progress import print_table

  experiment = resolve(_CONFIG.value)
  parts = build_parts(experiment, None, Extensions())

  async def work() -> list[GateResult]:
    try:
      return await check_environment(
        parts.tasks.train[: _TASKS.value],
        make_environment=parts.make_environment,
        rewards=parts.rewards,
        cheats=code_cheats,
        timeout=experiment.rollout.reward_timeout,
      )
    finally:
      await parts.close()

  try:
    results = asyncio.run(work())
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
    console.print(f"{r.source} {r.task_id}, {r.attempt}: {r.reward.value} {r.detail}", markup=False)
  if broken:
    sys.exit(1)


if __name__ == "__main__":
  main(run)
