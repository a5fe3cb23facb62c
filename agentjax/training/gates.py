"""The gates of an experiment: its own tasks, environment and rewards, tried before training."""

from __future__ import annotations

import dataclasses

from agentjax.envs.config import without_chance
from agentjax.rollout.cheats import Setting, cheats, solution
from agentjax.rollout.integrity import GateResult, check_environment
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.parts import Extensions, build_parts


async def check_experiment(
  experiment: Experiment,
  *,
  tasks: int,
  at_most: float = 0.0,
  extensions: Extensions | None = None,
) -> list[GateResult]:
  """Plays worked solution, empty answer and every cheat of the environment's kind.

  Luck is taken out of the environment (``envs.config.without_chance``).

  Args:
    experiment: of a run; a copy is validated and frozen here.
    tasks: training tasks to try, from the start.
    at_most: what an attempt other than the solution may get.
    extensions: what the run's caller brings.

  Raises:
    ConfigError: settings that cannot be used.
    ValueError: a task without a worked solution.
  """
  experiment = resolve(
    dataclasses.replace(experiment, environment=without_chance(experiment.environment))
  )
  parts = build_parts(experiment, None, extensions or Extensions())
  setting = Setting(
    experiment.environment, experiment.reward.pivot, tuple(tool.name for tool in parts.tools)
  )
  try:
    return await check_environment(
      parts.tasks.train[:tasks],
      make_environment=parts.make_environment,
      rewards=parts.rewards,
      cheats=lambda task: cheats(task, setting),
      reference=lambda task: solution(task, setting),
      at_most=at_most,
      timeout=experiment.rollout.reward_timeout,
    )
  finally:
    await parts.close()
