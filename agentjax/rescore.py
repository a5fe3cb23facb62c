"""Computes the rewards of stored episodes again, as a config now says, and writes a new store.

  python -m agentjax.rescore --trajectories=runs/a --config=runs/a/config.json --output=rescored.log
  python -m agentjax.rescore --trajectories=old.store --config=runs/a/config.json \
      --config.reward.settings.unit_tests.credit=fraction --output=new.store

``--trajectories`` is a run's directory (its journal), a journal, or a store. The episodes are not
changed; the new store is written completely or not at all. Neither model nor tokenizer is needed:
tasks, tools, world and scorers are made as a run of the config makes them.
"""

from __future__ import annotations

import pathlib

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.training.flags import define_config_flag

_CONFIG = define_config_flag()
_TRAJECTORIES = flags.DEFINE_string(
  "trajectories", None, "Directory of a run, its journal.log, or a trajectory store.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Trajectory store to write.", required=True)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  from agentjax.rollout.rescoring import compare
  from agentjax.training.experiment import resolve
  from agentjax.training.extended import extensions_of_run
  from agentjax.training.progress import print_table
  from agentjax.training.rescoring import read_trajectories, rescore_trajectories
  from agentjax.training.workdir import CONFIG_FILE
  from agentjax.trajectory.store import write_store

  experiment = resolve(_CONFIG.value)
  source, output = pathlib.Path(_TRAJECTORIES.value), pathlib.Path(_OUTPUT.value)
  before = read_trajectories(source)
  if output.exists() and output.samefile(source):
    raise ConfigError(f"--output={output} is --trajectories; name another file.")
  directory = source if source.is_dir() else source.parent
  run_of_them = directory if (directory / CONFIG_FILE).exists() else None
  call = (
    "agentjax.training.rescoring.rescore_trajectories(experiment, trajectories, Extensions(...))"
  )
  own = extensions_of_run(directory, None, call=call, needed=("tasks", "scorers"))
  after = rescore_trajectories(experiment, before, own, run_of_them)
  write_store(output, after)
  print_table(
    Console(),
    f"{len(before)} episodes of {source}",
    ("part", "before", "now", "changed"),
    compare(before, after),
  )


if __name__ == "__main__":
  main(run)
