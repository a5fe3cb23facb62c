"""A run's directory: one run, one process, its resolved config beside its results."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from absl import logging

from agentjax.config import ConfigError, check, differing_fields
from agentjax.files import held, write_atomically
from agentjax.training.checkpoint import CheckpointStore
from agentjax.training.experiment import Experiment, read_experiment, write_experiment
from agentjax.training.extended import (
  EXTENSIONS_FILE,
  Description,
  differing_parts,
  read_description,
  write_description,
)
from agentjax.training.journal import JOURNAL_FILE, journal_files, read_journal
from agentjax.trajectory.recordlog import StoreError

CONFIG_FILE = "config.json"
_LOCK_FILE = ".lock"
_ABANDONED = "abandoned"

# What a resumed run may have otherwise than when it began: it changes no figure but by rounding, or
# only how long is trained and what is measured.
_MAY_CHANGE = (
  "name",
  "rl.steps",
  "rl.mismatch_alarm",
  "rl.diagnostics",
  "evaluation",
  "checkpoint",
  "mesh",
  "devices",
  "engine.lanes",
  "engine.slots",
  "reward.samples",
  "reward.fault_alarm",
  "rollout.concurrency",
  "pretrained",  # its contents are a part of the checkpoints' identity
)


@contextlib.contextmanager
def open_workdir(
  path: str | pathlib.Path, experiment: Experiment, description: Description | None = None
) -> Iterator[pathlib.Path]:
  """Creates or re-opens a run's directory and holds it for this process.

  A run has the directory from its first finished step on. What a start left that never got there is
  kept in ``abandoned/``, until the next one, where another config or other extensions start anew.

  Args:
    path: the directory.
    experiment: validated.
    description: of the extensions in hand.

  Raises:
    ConfigError: it holds other files, a run of another config (every differing field is named), or
      another process is using it.
  """
  directory = pathlib.Path(path).absolute()
  if directory.exists() and not directory.is_dir():
    raise ConfigError(f"--workdir={directory} is a file; give a directory.")
  made = not directory.exists()
  directory.mkdir(parents=True, exist_ok=True)
  refusal = ConfigError(
    f"--workdir={directory} is in use by another process; stop it or give another directory."
  )
  with held(directory / _LOCK_FILE, refusal):
    try:
      _claim(directory, experiment, description or {})
      yield directory
    except BaseException:
      _forget_start(directory, made)
      raise


def keep_settings(
  directory: pathlib.Path, experiment: Experiment, description: Description
) -> None:
  """Writes down what the run goes on with; once all of it has been accepted."""
  write_atomically(directory / CONFIG_FILE, write_experiment(experiment))
  write_description(directory, description)


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


def _claim(directory: pathlib.Path, experiment: Experiment, description: Description) -> None:
  config = directory / CONFIG_FILE
  if config.exists():
    present, wanted = _read_config(config), json.loads(json.dumps(experiment.to_dict()))
    last = _last_step(directory)
    if last is None:
      recorded = read_description(directory)
      if _fixed(present) == _fixed(wanted) and not differing_parts(recorded or {}, description):
        return
      _abandon(directory)
    else:
      _check_resume(directory, present, wanted, last)
      return
  others = sorted(p.name for p in directory.iterdir() if p.name not in (_LOCK_FILE, _ABANDONED))
  if others:
    raise ConfigError(
      f"--workdir={directory} holds files that are no run ({', '.join(others[:5])}); "
      "give an empty or new directory."
    )
  keep_settings(directory, experiment, description)


def _check_resume(
  directory: pathlib.Path, present: dict[str, Any], wanted: dict[str, Any], last: int
) -> None:
  """Raises ConfigError where ``wanted`` cannot go on from the ``last`` step of ``present``."""
  differing = list(differing_fields(_fixed(present), _fixed(wanted), "config"))
  if differing:
    raise ConfigError(
      f"--workdir={directory} already holds another run: {'; '.join(differing)}. "
      "Give another --workdir, or the same config to resume it; on the way may change: "
      f"{', '.join(_MAY_CHANGE)}. --config.start_from={directory} begins a new run with the "
      "weights of this one."
    )
  before, now = present["rl"]["steps"], wanted["rl"]["steps"]
  if before == now:
    return
  done = last - wanted["supervised"]["steps"]
  check(now >= done, "config.rl.steps", now, f"at least {done}, which this run has done")
  if (shape := wanted["rl"]["optimizer"]["schedule"]) != "constant":
    logging.warning(
      "config.rl.steps is %d here and was %d: from here on the learning rate is that of the new "
      "length (config.rl.optimizer.schedule=%r), and a replay of earlier steps need not agree",
      now,
      before,
      shape,
    )


def _fixed(values: dict[str, Any]) -> dict[str, Any]:
  """A config as plain dicts, without the fields that may change."""
  result = copy.deepcopy(values)
  for name in _MAY_CHANGE:
    *parents, field = name.split(".")
    inner: Any = result
    for parent in parents:
      inner = inner.get(parent) or {}
    inner.pop(field, None)
  return result


def _read_config(file: pathlib.Path) -> dict[str, Any]:
  """A saved config; fields that are newer than it have their defaults.

  Raises:
    ConfigError: it is damaged, or of another version.
  """
  try:
    experiment = read_experiment(file.read_bytes(), str(file))
  except ConfigError as error:
    raise ConfigError(
      f"{error} Or put back a copy of {file}, or give another --workdir."
    ) from error
  experiment.make_paths_absolute()
  return json.loads(json.dumps(experiment.to_dict()))


def _last_step(directory: pathlib.Path) -> int | None:
  """The last step that is known to have been finished here; None where none was."""
  steps = [0, *CheckpointStore(directory / "checkpoints", keep=1, identity={}).steps()]
  steps += [value.step for kind, value in _records(directory) if kind == "step"]
  return max(steps) or None


def _abandon(directory: pathlib.Path) -> None:
  """Moves what a start left that never finished a step out of the way of the next."""
  kept = directory / _ABANDONED
  shutil.rmtree(kept, ignore_errors=True)
  kept.mkdir()
  for entry in list(directory.iterdir()):
    if entry.name not in (_LOCK_FILE, _ABANDONED):
      entry.rename(kept / entry.name)
  logging.warning(
    "%s: an earlier start with other settings never finished a step; what it left is in %s",
    directory,
    kept,
  )


def _forget_start(directory: pathlib.Path, made: bool) -> None:
  """Removes what a start wrote that was refused before it trained or sampled anything."""
  wrote = {CONFIG_FILE, EXTENSIONS_FILE, _LOCK_FILE, "tokenizer.model"}
  wrote |= {file.name for file in journal_files(directory / JOURNAL_FILE).values()}
  names = {entry.name for entry in directory.iterdir()} - {_ABANDONED}
  if not names <= wrote:
    return
  if any(True for _ in _records(directory)):
    return
  for name in names:
    (directory / name).unlink()
  if made:
    with contextlib.suppress(OSError):
      directory.rmdir()


def _records(directory: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """Of the journal, up to where it is damaged: it is mended when the run opens it."""
  journal = directory / JOURNAL_FILE
  with contextlib.suppress(StoreError):
    if journal.exists():
      yield from read_journal(journal)
