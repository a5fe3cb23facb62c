"""A run's directory: one run, one process, its resolved config beside its results."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator

from absl import logging

from agentjax.config import ConfigError, differing_fields
from agentjax.files import write_atomically
from agentjax.training.experiment import Experiment

CONFIG_FILE = "config.json"
_LOCK_FILE = ".lock"


@contextlib.contextmanager
def open_workdir(path: str | pathlib.Path, experiment: Experiment) -> Iterator[pathlib.Path]:
  """Creates or re-opens a run's directory and holds it for this process.

  Raises:
    ConfigError: it holds other files, a run of another config (every differing field is named), or
      another process is using it.
  """
  directory = pathlib.Path(path).absolute()
  if directory.exists() and not directory.is_dir():
    raise ConfigError(f"--workdir={directory} is a file; give a directory.")
  directory.mkdir(parents=True, exist_ok=True)
  with (directory / _LOCK_FILE).open("w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ConfigError(
        f"--workdir={directory} is in use by another process; stop it or give another directory."
      ) from error
    _claim(directory, experiment)
    yield directory


def keep_sources(directory: pathlib.Path, names: Iterable[str]) -> None:
  """Copies the modules that a config names into ``functions/``; warns where one has changed since.

  The config names a function and says nothing of its code. The copy is that of the run's start.

  Args:
    directory: of the run.
    names: "module:attribute"; those of agentjax itself are left out.
  """
  for name in names:
    module = sys.modules.get(name.partition(":")[0])
    file = module and inspect.getsourcefile(module)
    if not file or name.startswith("agentjax."):
      continue
    kept = directory / "functions" / f"{name.partition(':')[0]}.py"
    source = pathlib.Path(file).read_text()
    if not kept.exists():
      write_atomically(kept, source)
    elif kept.read_text() != source:
      logging.warning(
        "%s, which has %s, has changed since this run began with %s: steps from "
        "here on use the new code, and a replay of earlier ones need not agree",
        file,
        name,
        kept,
      )


def _claim(directory: pathlib.Path, experiment: Experiment) -> None:
  config = directory / CONFIG_FILE
  wanted = json.loads(json.dumps(experiment.to_dict()))
  if config.exists():
    try:
      present = json.loads(config.read_text())
    except json.JSONDecodeError as error:
      raise ConfigError(f"{config} is damaged ({error}); give another --workdir.") from error
    differing = list(differing_fields(present, wanted, "config"))
    if differing:
      raise ConfigError(
        f"--workdir={directory} already holds another run: {'; '.join(differing)}. "
        "Give another --workdir, or the same config to resume it."
      )
    return
  others = sorted(
    p.name for p in directory.iterdir() if p.name not in (_LOCK_FILE, "config.json.new")
  )
  if others:
    raise ConfigError(
      f"--workdir={directory} holds files that are no run ({', '.join(others[:5])}); "
      "give an empty or new directory."
    )
  write_atomically(config, json.dumps(wanted, indent=2) + "\n")
