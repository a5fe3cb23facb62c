"""Preferences as stored episodes, which ``config.rl.rollouts`` reads for DPO and similar
objectives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from agentjax.signals.teacher import template_fingerprint
from agentjax.training.build import Parts
from agentjax.training.demonstrations import append_spans
from agentjax.training.stored import Manifest, write_episodes
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Reward, Task, Trajectory

SOURCE = "preferences"


@dataclasses.dataclass(frozen=True)
class PreferenceRow:
  """Two replies to a prompt, of which one should become likelier than the other."""

  id: int
  prompt: tuple[Message, ...]
  chosen: str
  rejected: str


def preference_tasks(rows: Sequence[PreferenceRow], *, source: str = SOURCE) -> list[Task]:
  """The prompts of the rows as tasks; the demonstration is the chosen reply."""
  return [
    Task(row.id, row.prompt, "chosen", source, (Message("assistant", row.chosen),)) for row in rows
  ]


class TooLongError(ValueError):
  """A preference has more tokens than a row of the run that will learn from it."""


def preference_trajectories(
  row: PreferenceRow, parts: Parts, *, source: str = SOURCE
) -> tuple[Trajectory, Trajectory]:
  """Chosen with reward 1 and rejected with reward 0, as two episodes of one task.

  Raises:
    TooLongError: one is longer than ``rl.row_length``.
  """
  made = []
  for sample, (reply, reward) in enumerate(((row.chosen, 1.0), (row.rejected, 0.0))):
    turns = (Message("assistant", reply),)
    builder = TrajectoryBuilder(step=0, task_id=row.id, sample=sample, source=source)
    length = append_spans(builder, parts.chat.conversation(row.prompt, turns, ()))
    limit = parts.experiment.rl.row_length
    if length > limit:
      raise TooLongError(
        f"reply {sample} of preference {row.id} has {length} tokens with its prompt; "
        f"config.rl.row_length={limit} allows {limit}."
      )
    made.append(builder.build(reward=Reward(reward)))
  return made[0], made[1]


def write_preferences(
  folder: str | os.PathLike[str],
  rows: Sequence[PreferenceRow],
  parts: Parts,
  *,
  source: str = SOURCE,
) -> Manifest:
  """Writes a folder for ``config.rl.rollouts``: the pairs that DPO learns from.

  Args:
    folder: new or empty.
    rows: with ids of their own.
    parts: vocabulary and chat of the run that will read it.
    source: name of the data set, as in ``preference_tasks``.

  Raises:
    ValueError: no row, an id twice, or a reply that is too long.
    CheckpointError: the folder is in use.
  """
  if len({row.id for row in rows}) != len(rows) or not rows:
    raise ValueError(f"{len(rows)} preferences; allowed: at least one, each with an id of its own.")
  return store_pairs(
    folder, [t for row in rows for t in preference_trajectories(row, parts, source=source)], parts
  )


def store_pairs(
  folder: str | os.PathLike[str], episodes: Sequence[Trajectory], parts: Parts
) -> Manifest:
  """Writes episodes of ``preference_trajectories``; see ``write_preferences``."""
  manifest = Manifest(
    tokenizer=parts.tokenizer.fingerprint(),
    template=template_fingerprint(parts.chat, parts.experiment.chat),
    policy="",
    teachers={},
    demonstrations_by="",
    temperature=parts.experiment.rl.sampling.temperature or 1.0,
    episodes=len(episodes),
    tokens=sum(int((s.weights > 0).sum()) for t in episodes for s in t.segments),
  )
  write_episodes(folder, episodes, manifest)
  return manifest
