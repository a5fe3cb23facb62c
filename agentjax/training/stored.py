"""Stored episodes: written once with the teachers' log-probs, then trained on.

A folder holds ``episodes.log``, one trajectory per record, and ``manifest.json``, which describes
them. It is written under another name and renamed, so an existing folder is complete.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from absl import logging

from agentjax.config import ConfigError
from agentjax.data import TaskIterator
from agentjax.files import CheckpointError, check_empty, written_beside
from agentjax.objectives.distillation import DistillationConfig
from agentjax.rollout.keys import Address
from agentjax.rollout.stream import StreamState
from agentjax.signals.teacher import template_fingerprint
from agentjax.training import processes
from agentjax.training.build import Parts
from agentjax.training.experiment import RLStage
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import read_store, write_store

_EPISODES, _MANIFEST, _FORMAT = "episodes.log", "manifest.json", 3
WRITTEN_BY = "agentjax recipes.lightning_opd.distill"  # the command, for messages


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Description of stored episodes.

  Attributes:
    tokenizer, template: fingerprints of the vocabulary, and of how conversations are written.
    policy: fingerprint of the parameters that sampled, "" where they are not known.
    teachers: identity of every teacher, by the data sets it scored, joined by ","; "" stands for
      all that no other teacher names.
    demonstrations_by: identity of the model that wrote the policy's warm start; "" if not known.
    temperature: of sampling and scores.
    top_k, candidates: number of candidates per token with log-probs, and whose likeliest tokens
      they are; 0 and "" if only the sampled tokens have log-probs.
    episodes, tokens: how many there are, and of how many tokens the policy sampled.
  """

  tokenizer: str
  template: str
  policy: str
  teachers: dict[str, str]
  demonstrations_by: str
  temperature: float
  episodes: int
  tokens: int
  top_k: int = 0
  candidates: str = ""

  def warn_of_inconsistency(self) -> None:
    """Warns if the teacher is not the model that wrote the policy's demonstrations.

    Theorems 3.8 and 3.9 of 2604.13010: then the result is biased, online and offline.
    """
    for sources, identity in self.teachers.items():
      if self.demonstrations_by and identity != self.demonstrations_by:
        logging.warning(
          "the teacher %s (of %s) is not the model %s that wrote the demonstrations of the "
          "policy's warm start: log-probs of another teacher bias what is learnt (2604.13010, "
          "teacher consistency)",
          identity[:12],
          sources or "all data sets",
          self.demonstrations_by[:12],
        )


def write_episodes(
  folder: str | os.PathLike[str], trajectories: Iterable[Trajectory], manifest: Manifest
) -> None:
  """Writes a complete folder, or nothing.

  Raises:
    CheckpointError: the folder is in use.
  """
  with written_beside(check_empty(folder)) as beside:
    beside.mkdir()
    write_store(beside / _EPISODES, trajectories)
    values = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    (beside / _MANIFEST).write_text(json.dumps(values, indent=2) + "\n")


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
  """The manifest of a folder.

  Raises:
    CheckpointError: it is no such folder, or of another format.
  """
  file = pathlib.Path(folder) / _MANIFEST
  if not file.is_file():
    raise CheckpointError(
      f"{folder} holds no {_MANIFEST}; allowed: a folder written by {WRITTEN_BY}."
    )
  try:
    values = json.loads(file.read_text())
    form = values.pop("format", None)
    if form == _FORMAT:
      return Manifest(**values)
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    raise CheckpointError(f"{file} is damaged: {error}; write the folder anew.") from error
  raise CheckpointError(f"{file} has another format than {_FORMAT}; write the folder anew.")


def read_episodes(folder: str | os.PathLike[str]) -> list[Trajectory]:
  """All episodes of a folder, in the order written."""
  return list(read_store(pathlib.Path(folder) / _EPISODES))


def check_manifest(manifest: Manifest, parts: Parts, path: str = "config.rl.rollouts") -> None:
  """Refuses episodes of another vocabulary, template or temperature; warns of another teacher.

  Raises:
    ConfigError: token ids or log-probs of the folder have another meaning in this run, or the
      objective needs log-probs that were not stored and there is no teacher.
  """
  experiment = parts.experiment
  for name, stored, here, allowed in (
    ("tokenizer", manifest.tokenizer, parts.tokenizer.fingerprint(), "the same vocabulary"),
    (
      "template",
      manifest.template,
      template_fingerprint(parts.chat, experiment.chat),
      "the same markup, chat template, system prompt and config.chat",
    ),
    (
      "temperature",
      manifest.temperature,
      experiment.rl.sampling.temperature or 1.0,
      "the same config.rl.sampling.temperature",
    ),
  ):
    if stored != here:
      raise ConfigError(
        f"{path}={experiment.rl.rollouts!r} was made with {name} {str(stored)[:12]} and this run "
        f"has {str(here)[:12]}; allowed: {allowed}. Make it anew with {WRITTEN_BY}."
      )
  for phase in experiment.rl.all_phases:
    if phase.objective.distillation is not None:
      _check_answers(manifest, phase.objective.distillation, experiment.rl, path)
  manifest.warn_of_inconsistency()


def _check_answers(
  manifest: Manifest, settings: DistillationConfig, stage: RLStage, path: str
) -> None:
  if settings.needs_live_teacher:
    return  # there is one: the config has been validated
  if settings.form == "sampled":
    served = bool(manifest.teachers) and not manifest.top_k
  else:
    served = settings.top_k <= manifest.top_k and settings.candidates == manifest.candidates
  if served or (stage.teachers and not (settings.form == "top_k" and manifest.top_k)):
    return
  raise ConfigError(
    f"{path}={stage.rollouts!r} has {_words(manifest)} and config.rl.objective.distillation "
    f"(form, top_k, candidates) asks for {_words(settings)}; allowed: what is stored, or fewer "
    f"candidates. Change that, or make the folder anew with {WRITTEN_BY}."
  )


def _words(of: Manifest | DistillationConfig) -> str:
  if isinstance(of, Manifest) and not of.teachers:
    return "no log-probs of a teacher"
  sampled = not of.top_k if isinstance(of, Manifest) else of.form == "sampled"
  which = "the sampled" if sampled else f"the {of.candidates}'s {of.top_k} likeliest"
  return f"a teacher's log-probs of {which} tokens"


def warn_of_other_policy(manifest: Manifest, policy: str) -> None:
  """Warns where training does not start from the policy that sampled the episodes.

  Args:
    manifest: of the episodes.
    policy: fingerprint of the parameters that reinforcement learning starts from.
  """
  if manifest.policy and manifest.policy != policy:
    logging.warning(
      "the stored episodes were sampled by the policy %s and training starts from %s: they are off "
      "policy from the first step on",
      manifest.policy[:12],
      policy[:12],
    )


class StoredGroups:
  """Gives stored groups with the interface of ``rollout.stream.GroupStream``.

  Each step takes the groups of its tasks; when all were used, they come again in another order.

  Args:
    trajectories: the episodes, with ids of tasks.
    parts: of the run; they have the training tasks of the episodes.
    first: number of the first step.

  Raises:
    ConfigError: too few of the tasks have episodes.
  """

  dropped = 0

  def __init__(self, trajectories: Sequence[Trajectory], parts: Parts, first: int):
    self._groups: dict[tuple[str, int], list[Trajectory]] = collections.defaultdict(list)
    for trajectory in trajectories:
      self._groups[trajectory.source, trajectory.task_id].append(trajectory)
    stage: RLStage = parts.experiment.rl
    tasks = [task for task in parts.tasks.train if (task.source, task.id) in self._groups]
    if len(tasks) < stage.tasks_per_step:
      raise ConfigError(
        f"config.rl.rollouts={stage.rollouts!r} has episodes of {len(tasks)} training tasks; "
        f"allowed: at least config.rl.tasks_per_step={stage.tasks_per_step}. Lower that, or store "
        "more."
      )
    self._tasks = TaskIterator(tasks, batch_size=stage.tasks_per_step, seed=parts.experiment.seed)
    self._next = first

  def awaits(self, address: Address) -> bool:
    """Whether an episode of the journal is still to be trained on: none is, as all are stored."""
    return False

  def remember(self, episodes: Iterable[Trajectory]) -> None:
    """Nothing: all episodes are stored."""

  async def get_state(self) -> StreamState:
    """The place in the order of tasks."""
    return StreamState({"round": self._next, "tasks": self._tasks.get_state()}, [])

  def set_state(self, plain: dict[str, Any]) -> None:
    """Goes on where ``get_state`` was taken."""
    self._tasks.set_state(plain["tasks"])
    self._next = plain["round"]

  async def consume(self, groups: Collection[tuple[int, int]]) -> None:
    """Nothing: ``take`` moves on."""

  async def take_refused(self) -> list[Trajectory]:
    """None: all stored groups are trained on."""
    return []

  async def fill(self, version: int, count: int) -> None:
    """Nothing: all episodes have ended."""

  async def take(self, step: int, size: int) -> list[Trajectory]:
    """The groups of the next tasks, as episodes of ``step``, by address."""
    taken = [
      dataclasses.replace(trajectory, step=step, sample=sample)
      for task in processes.share(next(self._tasks))
      for sample, trajectory in enumerate(self._groups[task.source, task.id])
    ]
    self._next = step + 1
    return sorted(taken, key=lambda t: t.address)

  async def settle(self) -> None:
    """Nothing is under way."""

  async def close(self) -> None:
    """Nothing is under way."""
