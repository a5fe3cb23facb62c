"""Playing episodes once and asking the teachers once: what ``config.rl.rollouts`` is trained on."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from agentjax.config import ConfigError
from agentjax.models import Params
from agentjax.objectives.objective import policy_objective
from agentjax.rollout.loop import collect
from agentjax.training.checkpoint import latest_checkpoint
from agentjax.training.evaluation import build_engine, load_policy
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.fingerprint import fingerprint
from agentjax.training.learner import Learner
from agentjax.training.loop_thread import LoopThread
from agentjax.training.parts import Extensions, Parts, build_parts
from agentjax.training.stored import Manifest, check_empty, write_episodes
from agentjax.training.teacher import TeacherConfig, load_teacher, template_fingerprint
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

  Args:
    experiment: validated and frozen here; ``rl.teachers`` are asked.
    checkpoint: of the policy, with the experiment's model.
    output: new or empty directory.
    tasks, samples: how many training tasks are played, and how often each.
    episodes: a store to take them from instead.
    demonstrations_by: path of the model that wrote the policy's warm start, to warn where it is not
      the teacher.
    extensions: as in ``Run``.

  Raises:
    ConfigError: no teacher, or one of another vocabulary.
    CheckpointError: nothing to load, or the output is in use.
  """
  resolve(experiment)
  stage = experiment.rl
  if not stage.teachers:
    raise ConfigError("config.rl.teachers=(); allowed: at least one teacher to ask.")
  check_empty(output)
  path = latest_checkpoint(pathlib.Path(checkpoint))
  parts = build_parts(experiment, path.parents[1], extensions or Extensions())
  learner = Learner(parts, policy_objective(stage.objective))
  started = time.monotonic()
  policy = ""
  if episodes is None:
    params = load_policy(parts, path)
    policy = fingerprint(params)
    played = _play(parts, params, tasks, samples)
  else:
    played = list(read_store(episodes))
  between = time.monotonic()
  kept = [t for t in played if t.segments and not t.status.masked]
  scored: list[Trajectory] = []
  for at in range(0, len(kept), _BATCH):
    part = kept[at : at + _BATCH]
    found = learner.score_by_teachers(part)
    scored += [with_scores(t, values) for t, values in zip(part, found, strict=True)]
  timing = Timing(between - started, time.monotonic() - between)
  author = ""
  if demonstrations_by is not None:
    config = TeacherConfig(demonstrations_by)
    author = load_teacher(config, parts.chat, parts.model, learner.mesh).identity
  manifest = Manifest(
    tokenizer=parts.tokenizer.fingerprint(),
    template=template_fingerprint(parts.chat, experiment.chat),
    policy=policy,
    teachers={
      ",".join(config.sources): learner.teachers[i].identity
      for i, config in enumerate(stage.teachers)
    },
    demonstrations_by=author,
    temperature=stage.sampling.temperature or 1.0,
    episodes=len(scored),
    tokens=sum(int(s.sampled.sum()) for t in scored for s in t.segments),
  )
  manifest.warn_of_inconsistency()
  write_episodes(output, scored, manifest)
  return manifest, timing


def _play(parts: Parts, params: Params, tasks: int | None, samples: int) -> list[Trajectory]:
  """Episodes of the first training tasks, all sampled before the first update: version 0."""
  experiment = parts.experiment
  engine, runner = build_engine(parts), LoopThread()
  try:
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
    runner.run(parts.registry.close())
    engine.close()
    runner.close()


def with_scores(trajectory: Trajectory, log_probs: np.ndarray) -> Trajectory:
  """The trajectory with the teacher's log-prob on each of its tokens."""
  lengths: Sequence[int] = [len(segment) for segment in trajectory.segments]
  pieces = np.split(log_probs.astype(np.float32), np.cumsum(lengths)[:-1])
  segments = [
    dataclasses.replace(segment, teacher_log_probs=piece)
    for segment, piece in zip(trajectory.segments, pieces, strict=True)
  ]
  return dataclasses.replace(trajectory, segments=segments)
