"""The gates of an experiment: its own tasks, environment and rewards, tried before training."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Collection, Sequence

from agentjax.envs.config import without_chance
from agentjax.rollout.cheats import Setting, cheats, solution
from agentjax.rollout.integrity import GateResult, check_environment
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.parts import Extensions, build_parts
from agentjax.trajectory.record import Message, Task


async def check_experiment(
  experiment: Experiment,
  *,
  tasks: int,
  at_most: float = 0.0,
  names: Collection[str] | None = None,
  extensions: Extensions | None = None,
) -> list[GateResult]:
  """Plays worked solution, empty answer and every cheat of the environment's kind.

  Luck is taken out of the environment (``envs.config.without_chance``).

  Args:
    experiment: of a run; a copy is validated and frozen here.
    tasks: training tasks to try, from the start.
    at_most: what an attempt other than the solution may get.
    names: of the cheats to play; None plays all.
    extensions: what the run's caller brings.

  Raises:
    ConfigError: settings that cannot be used.
    ValueError: a task without a worked solution.
  """
  experiment = resolve(
    dataclasses.replace(experiment, environment=without_chance(experiment.environment))
  )
  with tempfile.TemporaryDirectory() as folder:  # for a vocabulary that is learnt from the tasks
    parts = build_parts(experiment, pathlib.Path(folder), extensions or Extensions())
  setting = Setting(
    environment=experiment.environment,
    pivot=experiment.reward.pivot,
    tools=tuple(tool.name for tool in parts.tools),
    answer=experiment.rollout.answer,
  )

  def chosen(task: Task) -> dict[str, Sequence[Message]]:
    attempts = cheats(task, setting)
    return {name: attempts[name] for name in attempts if names is None or name in names}

  try:
    return await check_environment(
      parts.tasks.train[:tasks],
      make_environment=parts.make_environment,
      rewards=parts.rewards,
      cheats=chosen,
      reference=lambda task: solution(task, setting),
      at_most=at_most,
      timeout=experiment.rollout.reward_timeout,
    )
  finally:
    await parts.close()
