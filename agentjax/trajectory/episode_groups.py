"""Groups of a step's episodes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax.trajectory.record import BRANCHES, Trajectory

Key = tuple[int, int, str]  # step, task, group of the advantage


def usable_groups(episodes: Sequence[Trajectory]) -> dict[Key, list[Trajectory]]:
  """Episodes with a verdict by group, in their order."""
  groups: dict[Key, list[Trajectory]] = collections.defaultdict(list)
  for one in episodes:
    if one.usable:
      groups[(*one.address[:2], one.group)].append(one)
  return groups


def value_of(episode: Trajectory) -> float:
  """The reward of an episode that has one."""
  assert episode.reward.value is not None
  return episode.reward.value


def replayed(episode: Trajectory) -> Trajectory:
  """A copy that is marked as one of an earlier step. It no longer shares segments with others."""
  metadata = {k: v for k, v in episode.metadata.items() if k != BRANCHES}
  columns = {**episode.columns, "replayed": np.array(True)}
  return dataclasses.replace(episode, columns=columns, metadata=metadata)


def generator(seed: int, key: Key) -> np.random.Generator:
  """Random numbers of a group, by its address."""
  return np.random.default_rng([seed, *key[:2], *key[2].encode()])
