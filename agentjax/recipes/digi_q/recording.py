"""A folder of transitions.

settings.json                what they were made with
transitions.jsonl            a row a turn, see ``transitions.Transition``
representation/train.jsonl   a question a turn, on which the backbone is fine-tuned
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.data.synthesis_folder import SETTINGS, claim
from agentjax.files import write_atomically
from agentjax.recipes.digi_q.settings import RecordConfig
from agentjax.recipes.digi_q.transitions import (
  YES,
  Transition,
  TransitionReader,
  representation_rows,
)
from agentjax.tools.declared import declared_tools
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import load_policy_with_chat
from agentjax.training.rescoring import read_trajectories

TRANSITIONS, REPRESENTATION = "transitions.jsonl", "representation/train.jsonl"


@dataclasses.dataclass(frozen=True)
class Recorded:
  """What ``record`` found.

  Attributes:
    episodes: with transitions. transitions: of them.
    refused: episodes without transitions, by reason.
    unwritable: transitions whose history cannot be written as messages; they are not imitated.
    questions: rows of the representation stage. changed: those whose answer is yes.
  """

  episodes: int
  transitions: int
  refused: Mapping[str, int]
  unwritable: int
  questions: int
  changed: int


def record(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  checkpoint: str,
  trajectories: str,
  config: RecordConfig,
  extensions: Extensions | None = None,
) -> Recorded:
  """Writes the transitions of stored episodes, and the questions for the backbone.

  Args:
    experiment: validated and frozen here; its world has the tasks of the episodes.
    output: new, empty, or of an earlier call with the same settings.
    checkpoint: of the policy that played; its markup reads the episodes.
    trajectories: a run, a journal or a store.
    config: see RecordConfig.
    extensions: may bring tasks and tools.

  Raises:
    CheckpointError: no policy to load.
    ConfigError: settings that cannot be, or an output of other settings.
    DataError: tasks that cannot be read, an episode of another task, or no transition at all.
  """
  resolve(experiment)
  config.validate("record")
  chat = load_policy_with_chat(checkpoint, experiment).chat
  scoring = build_scoring(experiment, extensions or Extensions())
  asyncio.run(scoring.close())
  tasks = {task.id: task for task in (*scoring.tasks.train, *scoring.tasks.test)}
  reader = TransitionReader(chat, config)
  found: list[Transition] = []
  refused: collections.Counter[str] = collections.Counter()
  episodes = read_trajectories(pathlib.Path(trajectories))
  for number, episode in enumerate(episodes):
    task, reason = tasks.get(episode.task_id), reader.refusal(episode)
    if task is None:
      raise DataError(
        f"episode {number} is of task {episode.task_id}, which the world of --config does not have",
        trajectories,
      )
    if reason is not None:
      refused[reason] += 1
      continue
    tools = declared_tools(task.metadata) or scoring.world.tools
    found += reader.read(episode, task, tools, len(found))
  if not found:
    raise DataError(
      f"none of {len(episodes)} episodes has a transition: {dict(refused)}", "episodes"
    )
  digest = hashlib.sha256(_file_of(trajectories).read_bytes()).hexdigest()
  settings = {"record": config.to_dict(), "chat": chat.fingerprint(), "episodes": digest}
  directory = claim(output, settings, (TRANSITIONS, REPRESENTATION))
  questions = representation_rows(found)
  write_atomically(directory / REPRESENTATION, _lines(questions))
  write_atomically(directory / TRANSITIONS, _lines([one.to_row() for one in found]))
  return Recorded(
    episodes=len(episodes) - refused.total(),
    transitions=len(found),
    refused=dict(refused),
    unwritable=sum(one.messages is None for one in found),
    questions=len(questions),
    changed=sum(row["answer"] == YES for row in questions),
  )


def read_transitions(folder: str | os.PathLike[str]) -> tuple[list[Transition], dict[str, Any]]:
  """The transitions of a folder by their ids, and its settings with the hash of the transitions.

  Raises:
    ConfigError: the folder holds no transitions.
    DataError: a damaged file.
  """
  file, settings = pathlib.Path(folder) / TRANSITIONS, pathlib.Path(folder) / SETTINGS
  if not file.is_file() or not settings.is_file():
    raise ConfigError(
      f"--transitions={os.fspath(folder)!r} holds no transitions; allowed: the output of "
      "python -m agentjax.recipes.digi_q.record."
    )
  found = []
  for line, row in read_jsonl(file):
    try:
      found.append(Transition.from_row(row))
    except KeyError as error:
      raise DataError(f"the row has no {error.args[0]!r}", file, line) from error
  sha = hashlib.sha256(file.read_bytes()).hexdigest()
  return found, {**json.loads(settings.read_text()), "sha256": sha}


def _file_of(trajectories: str) -> pathlib.Path:
  path = pathlib.Path(trajectories)
  return path / "journal.log" if path.is_dir() else path


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
  return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
