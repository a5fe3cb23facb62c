"""A library that evolves over a file of preferences, in a folder.

state.json      the run between two iterations; the same call goes on from it
library.json    the best library so far, which the scorer of a run reads
settings.json   what they were made with; a folder holds those of one setting
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.synthesis_folder import claim
from agentjax.files import write_atomically
from agentjax.recipes.reward_harness.library import (
  Choice,
  Demonstration,
  Harness,
  HarnessConfig,
  HarnessState,
  Library,
  split,
)
from agentjax.recipes.reward_harness.models import HarnessModels
from agentjax.rewards.judges import question_key

STATE, LIBRARY = "state.json", "library.json"
_BETTER: Mapping[str, Choice] = {"first": "A", "second": "B", "tie": "tie"}


def read_demonstrations(path: str | os.PathLike[str]) -> list[Demonstration]:
  """Preferences of a JSONL file: the texts ``prompt``, ``first``, ``second``, and ``better``,
  "first", "second" or "tie". Rows with one integer ``group`` compare the same answers.

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with line and field.
  """
  found = []
  for line, row in read_jsonl(path):
    prompt, first, second = (
      require_text(row, name, path, line) for name in ("prompt", "first", "second")
    )
    label, group = _BETTER.get(str(row.get("better"))), row.get("group")
    if label is None:
      raise DataError(
        f"'better' is {row.get('better')!r}; allowed: {', '.join(_BETTER)}", path, line
      )
    if group is not None and type(group) is not int:
      raise DataError(f"'group' is {group!r}; allowed: an integer, or none", path, line)
    shown = {"prompt": prompt}
    found.append(Demonstration(line - 1, shown, first, second, label, group))
  return found


def read_library(path: str | os.PathLike[str]) -> Library:
  """The library of a file that ``evolve_library`` has written.

  Raises:
    DataError: no such file, or another one.
  """
  try:
    return Library.from_dict(json.loads(pathlib.Path(path).read_text()))
  except (OSError, ValueError) as error:
    raise DataError(
      f"is no library ({error}); python -m agentjax.recipes.reward_harness.evolve writes one", path
    ) from error


def evolve_library(
  pairs: str | os.PathLike[str],
  output: str | os.PathLike[str],
  models: HarnessModels,
  *,
  config: HarnessConfig,
  key: int,
  made_with: Mapping[str, Any],
) -> HarnessState:
  """Evolves a library to ``config.iterations``, from where an earlier call stopped.

  Args:
    pairs: file of ``read_demonstrations``.
    output: new, empty, or of an earlier call; only ``iterations`` and ``concurrency`` may differ.
    models: judge and analyser.
    config: see HarnessConfig.
    key: of the split and of all randomness.
    made_with: plain JSON that names the models.

  Raises:
    ConfigError: an output of other settings.
    DataError: pairs or a state that cannot be read.
    JudgeUnavailableError: a model could not be asked; the same call goes on.
  """
  demonstrations = read_demonstrations(pairs)
  train, validation = split(demonstrations, key=key)
  kept = config.to_dict()
  settings = {name: kept[name] for name in kept if name not in ("iterations", "concurrency")}
  directory = claim(
    output,
    {
      "harness": settings,
      "key": key,
      "pairs": question_key(json.dumps([dataclasses.asdict(d) for d in demonstrations])),
      **made_with,
    },
    (STATE, LIBRARY),
  )
  harness = Harness(
    train,
    validation,
    judge=models.judge,
    propose=models.propose,
    probe=models.probe,
    repair=models.repair,
    config=config,
    key=key,
  )

  def save(state: HarnessState) -> None:
    write_atomically(
      directory / LIBRARY, json.dumps(dataclasses.asdict(state.best), indent=2) + "\n"
    )
    write_atomically(directory / STATE, state.to_json() + "\n")

  return asyncio.run(harness.evolve(_state(directory / STATE), save=save))


def _state(path: pathlib.Path) -> HarnessState | None:
  if not path.exists():
    return None
  try:
    return HarnessState.from_json(path.read_text())
  except (ValueError, KeyError, TypeError) as error:
    raise DataError(f"is no state of a harness ({error})", path) from error
