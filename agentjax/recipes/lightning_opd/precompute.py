"""Plays episodes once and scores them once by the teachers, for ``config.rl.rollouts``."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import ConfigError
from agentjax.files import check_empty
from agentjax.models import Params
from agentjax.models.lora import merge_adapters
from agentjax.objectives.distillation import DistillationConfig
from agentjax.rollout.loop import collect
from agentjax.sharding import fingerprint, make_mesh
from agentjax.signals.build import signal_tools
from agentjax.signals.teacher import TeacherConfig, Teachers, load_teacher, template_fingerprint
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, Parts, build_parts
from agentjax.training.checkpoint import latest_checkpoint
from agentjax.training.evaluation import build_engine, load_policy
from agentjax.training.experiment import Experiment, RLStage, resolve
from agentjax.training.extended import extensions_of_run
from agentjax.training.placement import place
from agentjax.training.stored import Manifest, write_episodes
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import read_store

_BATCH = 256  # episodes put to the teachers at once


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds that went into playing and into scoring."""

  playing: float
  scoring: float


def precompute(
  experiment: Experiment,
  checkpoint: str | os.PathLike[str],
  output: str | os.PathLike[str],
  *,
  tasks: int | None = None,
  samples: int = 1,
  episodes: str | os.PathLike[str] | None = None,
  demonstrations_by: str | None = None,
  extensions: Extensions | None = None,
) -> tuple[Manifest, Timing]:
  """Writes a folder for ``config.rl.rollouts``.

  ``rl.objective.distillation`` says what is stored: form "sampled" the log-probs of the tokens,
  "top_k" those of ``top_k`` ``candidates`` per token.

  Args:
    experiment: validated and frozen here; ``rl.teachers`` are asked.
    checkpoint: of the policy, with the experiment's model. It plays, and has the likeliest tokens
      where those are the candidates.
    output: new or empty directory.
    tasks, samples: how many training tasks are played, and how often each.
    episodes: a store to take them from instead.
    demonstrations_by: path of the model that wrote the policy's warm start, to warn where it is not
      the teacher.
    extensions: as in ``Run``; what the policy's run was extended with is used beside it.

  Raises:
    ConfigError: no teacher, or one of another vocabulary; a form that cannot be stored; the
      policy's run was extended with something that is not given and cannot be imported.
    CheckpointError: nothing to load, or the output is in use.
  """
  resolve(experiment)
  stage = experiment.rl
  if not stage.teachers:
    raise ConfigError("config.rl.teachers=(); allowed: at least one teacher to ask.")
  asked = _asked(stage)
  check_empty(output)
  path = latest_checkpoint(pathlib.Path(checkpoint))
  call = f"precompute(experiment, {str(checkpoint)!r}, ..., extensions=Extensions(...))"
  directory = path.parents[1]
  parts = build_parts(experiment, directory, extensions_of_run(directory, extensions, call=call))
  mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
  teachers = Teachers(stage.teachers, signal_tools(parts, mesh))
  started = time.monotonic()
  policy, params = "", None
  if episodes is None or asked.needs_comparison:
    params = load_policy(parts, path)
  if episodes is None:
    assert params is not None
    policy = fingerprint(merge_adapters(params))
    played = _play(parts, params, tasks, samples)
  else:
    played = list(read_store(episodes))
  between = time.monotonic()
  scored = _score(teachers, played, asked, params)
  timing = Timing(between - started, time.monotonic() - between)
  manifest = Manifest(
    tokenizer=parts.tokenizer.fingerprint(),
    template=template_fingerprint(parts.chat, experiment.chat),
    policy=policy,
    teachers={
      ",".join(config.sources): teachers[i].identity for i, config in enumerate(stage.teachers)
    },
    demonstrations_by=_identity(demonstrations_by, parts, mesh),
    temperature=stage.sampling.temperature or 1.0,
    top_k=asked.top_k if asked.form == "top_k" else 0,
    candidates=asked.candidates if asked.form == "top_k" else "",
    episodes=len(scored),
    tokens=sum(int(s.sampled.sum()) for t in scored for s in t.segments),
  )
  manifest.warn_of_inconsistency()
  write_episodes(output, scored, manifest)
  return manifest, timing


def _score(
  teachers: Teachers,
  played: Sequence[Trajectory],
  asked: DistillationConfig,
  params: Params | None,
) -> list[Trajectory]:
  """The episodes that can be trained on, with the teachers' scores."""
  kept = [t for t in played if t.segments and not t.status.masked]
  scored: list[Trajectory] = []
  for at in range(0, len(kept), _BATCH):
    part = kept[at : at + _BATCH]
    found = teachers.score(part, asked, params if asked.needs_comparison else None)
    scored += [with_answers(t, answers) for t, answers in zip(part, found, strict=True)]
  return scored


def _identity(path: str | None, parts: Parts, mesh: jax.sharding.Mesh) -> str:
  """Of the model at a path; "" without one."""
  if path is None:
    return ""
  return load_teacher(TeacherConfig(path), parts.chat, parts.model, mesh).identity


def _asked(stage: RLStage) -> DistillationConfig:
  """The scores that all phases need."""
  taught = [p.objective.distillation for p in stage.all_phases if p.objective.distillation]
  asked = {settings.stored for settings in taught}
  forms = sorted({settings.form for settings in asked})
  if "full" in forms:
    raise ConfigError(
      "config.rl.objective.distillation.form='full' needs the teacher in every update; allowed for "
      "stored episodes: 'sampled', or 'top_k' with as many candidates as you like."
    )
  if any(settings.form == "top_k" and settings.compares_candidates for settings in taught):
    raise ConfigError(
      "config.rl.objective.distillation.candidates of both models, and a candidate_loss, need the "
      "teacher at every step; allowed for stored episodes: candidates='student' or 'teacher', and "
      "candidate_loss=none."
    )
  if len(asked) > 1:
    raise ConfigError(
      "config.rl.objective and config.rl.phases ask teachers for different things (form "
      f"{', '.join(forms)}); allowed for stored episodes: one form, top_k and candidates."
    )
  return asked.pop()


def _play(parts: Parts, params: Params, tasks: int | None, samples: int) -> list[Trajectory]:
  """Episodes of the first training tasks, all sampled before the first update: version 0."""
  experiment = parts.experiment
  engine, runner = build_engine(parts), LoopThread()
  try:
    runner.run(parts.start())
    engine.publish(params, 0)
    return runner.run(
      collect(
        parts.tasks.train[:tasks],
        step=0,
        samples_per_task=samples,
        player=parts.player(engine, experiment.rl.sampling, experiment.seed),
        make_environment=parts.make_environment,
        rewards=parts.rewards,
        program=parts.program,
      )
    )
  finally:
    runner.run(parts.close())
    engine.close()
    runner.close()


def with_answers(trajectory: Trajectory, answers: Mapping[str, np.ndarray]) -> Trajectory:
  """The trajectory with a teacher's scores (``make_ask``) of its only path.

  Candidates, which take ``8 k`` bytes a token, stay with the segments that are learnt from.
  """
  lengths: Sequence[int] = [len(segment) for segment in trajectory.segments]
  ends = np.cumsum(lengths)[:-1]
  pieces = {name: np.split(value, ends) for name, value in answers.items()}
  segments = []
  for i, segment in enumerate(trajectory.segments):
    said: dict[str, Any] = {}
    if "log_probs" in pieces:
      said["teacher_log_probs"] = pieces["log_probs"][i].astype(np.float32)
    if "ids" in pieces and (segment.sampled.any() or segment.weights.any()):
      said["teacher_top_ids"] = pieces["ids"][i].astype(np.int32)
      said["teacher_top_log_probs"] = pieces["candidates"][i].astype(np.float32)
    segments.append(segment.with_columns(said))
  return dataclasses.replace(trajectory, segments=segments)
