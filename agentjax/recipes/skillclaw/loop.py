"""Nights over what is stored, and days and nights in turn, each in a folder.

  days.jsonl       how each day went
  day_NNN.store    the episodes of a day, if any has a verdict; else the day is played again
  night_NNN        the folder of a night (``recipes.skillclaw.night``)
  settings.json    what they were made with; a folder holds those of one setting

Each thing is on the disk before the next one begins, so a stopped call goes on where it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.adapters.agent_trajectories import TrajectoryForm
from agentjax.config import ConfigError
from agentjax.data.synthesis_folder import Report, RowFile, claim, unreported
from agentjax.recipes.skillclaw.library import Entries, Library
from agentjax.recipes.skillclaw.night import Night, NightReport, SkillClawConfig
from agentjax.recipes.skillclaw.play import ModelsConfig, NoBank, Stage, open_models, seat_identity
from agentjax.recipes.skillclaw.sessions import (
  Session,
  read_transcripts,
  sessions_of_episodes,
)
from agentjax.training.rescoring import read_trajectories
from agentjax.trajectory.record import Task
from agentjax.trajectory.store import read_store, write_store

_log = logging.getLogger(__name__)

DAYS = "days.jsonl"
_MODELS = ("player", "writer", "judge")


@dataclasses.dataclass(frozen=True)
class Material:
  """What a night is about.

  Attributes:
    transcripts: folder of conversations, untrusted.
    form: of their files.
    trajectories: a run, a journal or a store of episodes that the player played; trusted as to what
      they earned.
  """

  transcripts: str | None = None
  form: TrajectoryForm = "openai"
  trajectories: str | None = None


def evolve(
  stage: Stage | None,
  library: str | os.PathLike[str],
  output: str | os.PathLike[str],
  models: ModelsConfig,
  config: SkillClawConfig,
  material: Material,
  *,
  night: int = 0,
  report: Report = unreported,
) -> tuple[NightReport, list[str]]:
  """One night over what is stored, and what of it could not be read.

  Args:
    stage: tasks, world and player; None only with ``config.publish="propose"`` and transcripts,
      and models that need no policy of ours.
    library: folder of the skills.
    output: folder of the night.
    models: who is asked.
    config: of the night.
    material: what it is about.
    night: chooses the cases of the replays.
    report: called with what is done.

  Raises:
    ConfigError: settings that cannot be, or an output of other settings or sessions.
    DataError: an earlier output that is damaged.
    JudgeUnavailableError, JudgeRefusedError: a model failed; the same call goes on.
  """
  sessions: list[Session] = []
  refused: list[str] = []
  if material.trajectories is not None:
    if stage is None:
      raise ConfigError("--trajectories needs --config, whose player has their vocabulary.")
    episodes = read_trajectories(pathlib.Path(material.trajectories))
    sessions += sessions_of_episodes(episodes, stage.chat)
  if material.transcripts is not None:
    found, refused = read_transcripts(material.transcripts, material.form)
    sessions += found
  if not sessions:
    raise ConfigError(
      f"no session to learn from ({len(refused)} files were refused: {'; '.join(refused[:3])}); "
      "give --transcripts=FOLDER or --trajectories=RUN."
    )
  seed = 0 if stage is None else stage.experiment.seed
  made_with = {
    name: seat_identity(getattr(models, name)) if stage is None else stage.identity(name)
    for name in _MODELS
  }

  async def replay(entries: Entries) -> Sequence[float | None]:
    assert stage is not None
    return await stage.replay(entries, night)

  shelf = Library(library)
  with shelf.writing():
    work = Night(
      output,
      f"night_{night:03d}",
      shelf,
      sessions,
      open_models(models, config, NoBank() if stage is None else stage, seed),
      None if stage is None else replay,
      config,
      key=seed,
      made_with={"night": night, **made_with},
      report=report,
    ).run()
    return (asyncio.run(work) if stage is None else stage.run(work)), refused


@dataclasses.dataclass(frozen=True)
class Day:
  """How a day went.

  Attributes:
    success: share of the episodes with a verdict that succeeded.
    episodes: with a verdict.
    skills: of the day, with their versions.
    published, withdrawn: in the night after it.
  """

  success: float
  episodes: int
  skills: tuple[str, ...]
  published: tuple[str, ...]
  withdrawn: tuple[str, ...]


def live(
  stage: Stage,
  library: str | os.PathLike[str],
  output: str | os.PathLike[str],
  config: SkillClawConfig,
  *,
  days: int,
  tasks: int,
  samples: int = 1,
  transcripts: str | os.PathLike[str] | None = None,
  form: TrajectoryForm = "openai",
  report: Report = unreported,
) -> list[Day]:
  """Plays days and nights up to ``days``, from where an earlier call stopped.

  Args:
    stage: tasks, world and models.
    library: folder of the skills.
    output: new, empty, or of an earlier call; only ``days`` may differ.
    config: of the nights.
    days: in all. tasks: of a day. samples: episodes a task.
    transcripts: folder with a folder ``night_NNN`` for each night that has any; untrusted.
    form: of their files.
    report: called with what is done.

  Raises:
    ConfigError: settings that cannot be, an output of other settings, or a day without a verdict;
      the same call plays it again.
    DataError: an earlier output that is damaged.
    JudgeUnavailableError, JudgeRefusedError: a model failed; the same call goes on.
  """
  if days < 1 or tasks < 1 or samples < 1:
    raise ConfigError(f"days={days}, tasks={tasks}, samples={samples}; allowed: at least 1 each.")
  settings = config.to_dict()
  del settings["concurrency"]
  made_with = {name: stage.identity(name) for name in _MODELS}
  experiment = stage.experiment
  directory = claim(
    output,
    {
      "skills": settings,
      "tasks": tasks,
      "samples": samples,
      "seed": experiment.seed,
      "world": experiment.world.to_dict(),
      "data": experiment.data.to_dict(),
      **made_with,
    },
    (DAYS,),
  )
  rows = RowFile(directory / DAYS, {"success": float, "skills": list})
  shelf = Library(library)
  with shelf.writing():
    for day in range(days):
      if day not in rows.rows:
        rows.append({"id": day, **_live(
          day, stage, shelf, directory, config, made_with,
          tasks=_tasks(stage.parts.tasks.train, day, tasks), samples=samples,
          others=_others(transcripts, day, form), report=report,
        )})  # fmt: skip
      report("days", day + 1, days)
  return [_day(rows.rows[day]) for day in range(days)]


def _live(
  day: int,
  stage: Stage,
  library: Library,
  directory: pathlib.Path,
  config: SkillClawConfig,
  made_with: Mapping[str, Any],
  *,
  tasks: Sequence[Task],
  samples: int,
  others: Sequence[Session],
  report: Report,
) -> dict[str, Any]:
  """A day and its night; a row of ``days.jsonl``."""
  store = directory / f"day_{day:03d}.store"

  def stored() -> list[Session]:
    return sessions_of_episodes(read_store(store), stage.chat) if store.exists() else []

  sessions = stored()
  if not sessions:  # nothing of the night has changed the library then
    episodes = stage.play(tasks, library.entries(), samples=samples, step=day, held_out=False)
    if not sessions_of_episodes(episodes, stage.chat):
      reasons = sorted(
        {str(e.reward.reason or e.metadata.get("reason") or e.status) for e in episodes}
      )
      raise ConfigError(
        f"none of the {len(episodes)} episodes of day {day} has a verdict "
        f"({'; '.join(reasons[:3])}); allowed: a world and a player that work. The same command "
        "plays the day again."
      )
    write_store(store, episodes)
    sessions = stored()

  async def replay(entries: Entries) -> Sequence[float | None]:
    return await stage.replay(entries, day)

  night = Night(
    directory / f"night_{day:03d}",
    f"night_{day:03d}",
    library,
    [*sessions, *others],
    stage.models(),
    replay,
    config,
    key=stage.experiment.seed,
    made_with=made_with,
    report=report,
  )
  found = stage.run(night.run())
  wins = sum((session.score or 0.0) >= config.success for session in sessions)
  return {
    "success": wins / len(sessions),
    "episodes": len(sessions),
    "skills": list(found.skills),
    "published": list(found.published),
    "withdrawn": list(found.withdrawn),
  }


def _day(row: Mapping[str, Any]) -> Day:
  names = (tuple(row[name]) for name in ("skills", "published", "withdrawn"))
  return Day(row["success"], row["episodes"], *names)


def _tasks(tasks: Sequence[Task], day: int, count: int) -> list[Task]:
  """The tasks of a day: the next ones, from the beginning again after the last."""
  if len(tasks) < count:
    raise ConfigError(
      f"config.data has {len(tasks)} training tasks and --tasks={count}; raise "
      "config.data.train_size, or lower --tasks."
    )
  return [tasks[(day * count + i) % len(tasks)] for i in range(count)]


def _others(
  transcripts: str | os.PathLike[str] | None, day: int, form: TrajectoryForm
) -> list[Session]:
  folder = None if transcripts is None else pathlib.Path(transcripts) / f"night_{day:03d}"
  if folder is None or not folder.is_dir():
    return []
  found, refused = read_transcripts(folder, form)
  for reason in refused:
    _log.warning("left out: %s", reason)
  return found
