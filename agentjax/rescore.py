"""Computes the rewards of stored episodes again, as a config now says, and writes a new store.

  python -m agentjax.rescore --trajectories=runs/a --config=runs/a/config.json --output=rescored.log
  python -m agentjax.rescore --trajectories=old.store --config=runs/a/config.json \
      --config.reward.unit_tests.credit=fraction --output=new.store

``--trajectories`` is a run's directory (its journal), a journal, or a store. The episodes are read
and never changed; the new store is whole or not there. Neither model nor tokenizer is needed:
tasks, tools, world and scorers are made as a run of the config makes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.training.flags import define_config_flag
from agentjax.trajectory.record import Trajectory

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment
  from agentjax.training.parts import Extensions

_CONFIG = define_config_flag()
_TRAJECTORIES = flags.DEFINE_string(
  "trajectories", None, "Directory of a run, its journal.log, or a trajectory store.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Trajectory store to write.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.data.secret import FILE as SECRET_FILE
  from agentjax.rollout.rescoring import compare, write_store
  from agentjax.training.experiment import resolve
  from agentjax.training.extended import extensions_of_run
  from agentjax.training.progress import print_table

  experiment = resolve(_CONFIG.value)
  source, output = pathlib.Path(_TRAJECTORIES.value), pathlib.Path(_OUTPUT.value)
  before = read_trajectories(source)
  if output.exists() and output.samefile(source):
    raise ConfigError(f"--output={output} is --trajectories; name another file.")
  directory = source if source.is_dir() else source.parent
  secret = directory / SECRET_FILE
  if experiment.data.needs_secret and secret.exists():
    data = dataclasses.replace(experiment.data, secret_file=str(secret))
    experiment = dataclasses.replace(experiment, data=data)
  call = "agentjax.rescore.rescore_trajectories(experiment, trajectories, Extensions(...))"
  own = extensions_of_run(directory, None, call=call, needed=("tasks", "scorers"))
  after = rescore_trajectories(experiment, before, own)
  write_store(output, after)
  print_table(
    Console(),
    f"{len(before)} episodes of {source}",
    ("part", "before", "now", "changed"),
    compare(before, after),
  )


def rescore_trajectories(
  experiment: Experiment,
  trajectories: Sequence[Trajectory],
  extensions: Extensions | None = None,
) -> list[Trajectory]:
  """Copies of ``trajectories`` with the rewards that ``experiment`` gives them.

  Args:
    experiment: validated.
    trajectories: of its tasks.
    extensions: tasks and scorers that the run was extended with.

  Raises:
    ConfigError: parts that do not fit each other, or an episode of a task that is not in the data.
    DataError: tasks that cannot be read.
  """
  from agentjax.rollout.rescoring import rescore
  from agentjax.training.parts import Extensions, build_scoring

  scoring = build_scoring(experiment, extensions or Extensions())
  tasks = {task.id: task for task in itertools.chain(scoring.tasks.train, scoring.tasks.test)}

  async def work() -> list[Trajectory]:
    try:
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
  from agentjax.training import journal
  from agentjax.trajectory.store import StoreError, read_store

  file = path / "journal.log" if path.is_dir() else path
  try:
    with file.open("rb") as stream:
      is_journal = stream.read(len(journal.MAGIC)) == journal.MAGIC
    if is_journal:
      return [value for kind, value in journal.read_journal(file) if kind == "trajectory"]
    return list(read_store(file, recover_tail=True))
  except (OSError, StoreError) as error:
    raise ConfigError(f"--trajectories={path}: {error}") from error


if __name__ == "__main__":
  main(run)
