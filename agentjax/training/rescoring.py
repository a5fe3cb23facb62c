"""Stored episodes scored again, with the scorers that a run of the config has."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Sequence

from agentjax.config import ConfigError
from agentjax.rollout.rescoring import rescore
from agentjax.training import journal
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.experiment import Experiment
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import StoreError, read_store


def rescore_trajectories(
  experiment: Experiment,
  trajectories: Sequence[Trajectory],
  extensions: Extensions | None = None,
  directory: pathlib.Path | None = None,
) -> list[Trajectory]:
  """Copies of ``trajectories`` with the rewards that ``experiment`` gives them.

  Args:
    experiment: validated.
    trajectories: of its tasks.
    extensions: tasks and scorers that the run was extended with.
    directory: of the run; None where there is none.

  Raises:
    ConfigError: parts that do not fit each other, or an episode of a task that is not in the data.
    DataError: tasks that cannot be read.
  """
  scoring = build_scoring(experiment, extensions or Extensions(), directory)
  tasks = {task.id: task for task in itertools.chain(scoring.tasks.train, scoring.tasks.test)}

  async def work() -> list[Trajectory]:
    try:
      await scoring.start()
      return await rescore(
        trajectories, tasks, scoring.rewards, timeout=experiment.rollout.reward_timeout
      )
    finally:
      await scoring.close()

  try:
    return asyncio.run(work())
  except ValueError as error:
    raise ConfigError(str(error)) from error


def read_trajectories(path: pathlib.Path) -> list[Trajectory]:
  """The episodes of a run's directory, a journal or a store.

  Raises:
    ConfigError: no such file, or a damaged one.
  """
  file = path / "journal.log" if path.is_dir() else path
  try:
    with file.open("rb") as stream:
      is_journal = stream.read(len(journal.MAGIC)) == journal.MAGIC
    if is_journal:
      return [value for kind, value in journal.read_journal(file) if kind == "trajectory"]
    return list(read_store(file, recover_tail=True))
  except (OSError, StoreError) as error:
    raise ConfigError(f"--trajectories={path}: {error}") from error
