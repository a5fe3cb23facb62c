"""Profiling turns: how often a policy does what the expert did, from one-turn samples."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Sequence

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.models.huggingface import load_pretrained
from agentjax.rewards import RewardGraph
from agentjax.rollout import keys
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player
from agentjax.rollout.statistics import num_sampled_tokens
from agentjax.sharding import make_mesh
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import latest_checkpoint
from agentjax.training.evaluation import build_engine, load_policy
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.extended import Extended, use_recorded
from agentjax.training.placement import place
from agentjax.training.pretrained import runtime_overrides
from agentjax.trajectory.record import Trajectory
from agentjax.worlds.pivot.environment import PivotEnvironment
from agentjax.worlds.pivot.tasks import PivotRow, Profile

_AT_ONCE = 64  # rows whose episodes are held at one time: each holds its whole history


@dataclasses.dataclass(frozen=True)
class Profiles:
  """What profiling gave.

  Attributes:
    rows: those with at least one valid reward, with their profiles, by id.
    refused: row id -> why it was not profiled.
    sampled_tokens, prompt_tokens: drawn; and in the prompts, each counted once.
  """

  rows: list[PivotRow]
  refused: dict[int, str]
  sampled_tokens: int
  prompt_tokens: int


async def profile_pivots(
  rows: Sequence[PivotRow],
  *,
  samples: int,
  player: Player,
  rewards: RewardGraph,
) -> Profiles:
  """Samples every turn ``samples`` times and keeps mean and variance of the rewards.

  The samples of a row start from one prefill of its history. A prompt that leaves no room for an
  answer within ``rollout.max_total_tokens`` is refused before anything is sampled.

  Args:
    rows: with distinct ids; an old profile is replaced.
    samples: K, at least 2: one sample has no variance.
    player: its engine has the policy published; its sampling should be that of training.
    rewards: those of training; a turn that they cannot judge is refused.
  """
  if samples < 2:
    raise ValueError(f"samples={samples}; allowed: >= 2, since one reward has no variance")
  version = player.engine.version
  refused: dict[int, str] = {}
  fitting, prompt_tokens = [], 0
  for row in rows:
    try:
      length = sum(len(span.ids) for span in player.chat.prompt(row.history, row.tools))
    except ValueError as error:
      refused[row.id] = f"the history cannot be encoded: {error}"
      continue
    limit = player.config.max_total_tokens
    reason = rewards.refusal(row.task())
    if length >= limit:
      reason = f"the prompt alone fills rollout.max_total_tokens={limit}"
    if reason is not None:
      refused[row.id] = reason
      continue
    prompt_tokens += length
    fitting.append(row)
  # Separate draws: training may sample the same turn at the same step.
  measuring = dataclasses.replace(player, run_seed=keys.evaluation_seed(player.run_seed))
  profiled, sampled_tokens = [], 0
  for start in range(0, len(fitting), _AT_ONCE):
    some = fitting[start : start + _AT_ONCE]
    trajectories = await collect(
      [row.task() for row in some],
      step=version,
      samples_per_task=samples,
      player=measuring,
      make_environment=lambda task: PivotEnvironment(),
      rewards=rewards,
    )
    sampled_tokens += sum(num_sampled_tokens(t) for t in trajectories)
    groups: dict[int, list[Trajectory]] = collections.defaultdict(list)
    for trajectory in trajectories:
      groups[trajectory.task_id].append(trajectory)
    for row in some:
      found = [t.reward.value for t in groups[row.id] if t.reward.value is not None]
      if found:
        profiled.append(dataclasses.replace(row, profile=Profile.of(found, version)))
      else:
        broken = groups[row.id][0]
        refused[row.id] = broken.reward.reason or str(broken.status)
  return Profiles(profiled, refused, sampled_tokens, prompt_tokens)


def profile_checkpoint(
  experiment: Experiment,
  checkpoint: str | os.PathLike[str] | None,
  rows: Sequence[PivotRow],
  *,
  samples: int,
) -> Profiles:
  """``profile_pivots`` with the policy of a checkpoint.

  Sampling is that of ``config.rl``, so that profiles match training.

  Args:
    experiment: of the run; validated and frozen here.
    checkpoint: RUN/checkpoints/STEP, or RUN for its newest; None takes ``config.pretrained``.
    rows: turns to profile.
    samples: K.

  Raises:
    ConfigError: neither checkpoint nor pretrained folder, or a checkpoint of another config.
    CheckpointError: there is no checkpoint.
  """
  resolve(experiment)
  if checkpoint is None and experiment.pretrained is None:
    raise ConfigError("a policy is needed: give --checkpoint=RUN or --config.pretrained=DIR.")
  path = None if checkpoint is None else latest_checkpoint(pathlib.Path(checkpoint))
  directory = None if path is None else path.parents[1]
  extensions = Extensions(
    tasks=TaskSplits([], []), make_environment=lambda task: PivotEnvironment()
  )
  if directory is not None:  # a run's own scorers and tools; its tasks are not played
    call = "profile_pivots(...)"
    given = Extended(extensions)
    extensions = use_recorded(directory, given, call=call, needed=("tools", "scorers"))[
      0
    ].extensions
  parts = build_parts(experiment, directory, extensions)
  if path is not None:
    policy = load_policy(parts, path)
  else:
    assert experiment.pretrained is not None
    mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
    policy, _ = load_pretrained(
      experiment.pretrained, mesh=mesh, overrides=runtime_overrides(parts.model)
    )
  engine = build_engine(parts)
  runner = LoopThread()
  try:
    runner.run(parts.start())
    engine.publish(policy, 0 if path is None else int(path.name))
    return runner.run(
      profile_pivots(
        rows,
        samples=samples,
        player=parts.player(engine, experiment.rl.sampling, experiment.seed),
        rewards=parts.rewards,
      )
    )
  finally:
    runner.run(parts.close())
    engine.close()
    runner.close()
