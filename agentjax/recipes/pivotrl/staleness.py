"""When the profiles of turns are stale: the share of a run's groups whose rewards still differ."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from agentjax.config import Config, ConfigError, PositiveInt, Share
from agentjax.training.journal import read_journal
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class StalenessConfig(Config):
  """When turns are to be profiled again with the policy as it is now.

  As the policy learns, more and more groups have equal rewards and teach nothing. The paper does
  not say when it profiles again; the figures are ours.

  Attributes:
    least_mixed: profiles are stale if a smaller share of the groups has different rewards.
    window: latest training steps that are looked at.
  """

  least_mixed: Share = 0.5
  window: PositiveInt = 10


@dataclasses.dataclass(frozen=True)
class Staleness:
  """Share of mixed groups in the latest steps of a run, and the verdict on its profiles."""

  mixed: float
  steps: int
  stale: bool


def staleness(shares: Mapping[int, float], config: StalenessConfig) -> Staleness:
  """The verdict on shares of mixed groups by step; not stale before ``window`` steps are there."""
  config.validate()
  latest = [shares[step] for step in sorted(shares)[-config.window :]]
  mixed = float(np.mean(latest)) if latest else 1.0
  return Staleness(mixed, len(latest), len(latest) == config.window and mixed < config.least_mixed)


def mixed_shares(directory: str | os.PathLike[str]) -> dict[int, float]:
  """Share of groups whose valid rewards differ, by RL step of a run, from its journal.

  Raises:
    ConfigError: the directory holds no journal.
  """
  journal = pathlib.Path(directory) / "journal.log"
  if not journal.is_file():
    raise ConfigError(f"{os.fspath(directory)!r} holds no run: there is no journal.log.")
  episodes: dict[tuple[int, int, int], Trajectory] = {}
  shares: dict[int, float] = {}
  for kind, value in read_journal(journal):
    if kind == "trajectory":
      episodes[value.address] = value
    elif value.episodes:
      trained = [episodes.pop(address) for address in value.episodes]
      shares[value.step] = mixed_share(trained)
  return shares


def mixed_share(trajectories: Sequence[Trajectory]) -> float:
  """Share of the groups (by step and task) in which two valid rewards differ; 0 without groups."""
  groups: dict[tuple[int, int], set[float]] = collections.defaultdict(set)
  for trajectory in trajectories:
    rewards = groups[trajectory.address[:2]]
    if trajectory.reward.value is not None:
      rewards.add(trajectory.reward.value)
  return float(np.mean([len(rewards) > 1 for rewards in groups.values()])) if groups else 0.0
