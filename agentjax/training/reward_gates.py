"""Checks the rewards of an experiment with its own tasks and environment, before training."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Collection, Sequence

from agentjax.rollout.integrity import GateResult, check_environment
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import Experiment, resolve
from agentjax.trajectory.record import Message, Task
from agentjax.world.cheats import Setting


async def check_experiment(
  experiment: Experiment,
  *,
  tasks: int,
  at_most: float = 0.0,
  names: Collection[str] | None = None,
  extensions: Extensions | None = None,
) -> list[GateResult]:
  """Plays worked solution, empty answer and every cheat of the world.

  Chance is switched off in the world (``WorldConfig.without_chance``).

  Args:
    experiment: of a run; a copy is validated and frozen here.
    tasks: training tasks to try, from the start.
    at_most: what an attempt other than the solution may get.
    names: of the cheats to play; None plays all.
    extensions: of the run.

  Raises:
    ConfigError: settings that cannot be used.
    ValueError: a task without a worked solution.
  """
  experiment = resolve(dataclasses.replace(experiment, world=experiment.world.without_chance()))
  with tempfile.TemporaryDirectory() as folder:  # for a vocabulary that is learnt from the tasks
    parts = build_parts(experiment, pathlib.Path(folder), extensions or Extensions())
  setting = Setting(
    tools=tuple(tool.name for tool in parts.tools),
    answer=experiment.rollout.answer,
  )

  def chosen(task: Task) -> dict[str, Sequence[Message]]:
    attempts = parts.world.cheats(task, setting)
    return {name: attempts[name] for name in attempts if names is None or name in names}

  try:
    await parts.start()
    return await check_environment(
      parts.tasks.train[:tasks],
      make_environment=parts.make_environment,
      rewards=parts.rewards,
      cheats=chosen,
      reference=lambda task: parts.world.solution(task, setting),
      at_most=at_most,
      timeout=experiment.rollout.reward_timeout,
    )
  finally:
    await parts.close()
