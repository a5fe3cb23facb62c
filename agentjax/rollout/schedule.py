"""When groups begin, when they are trained on, and how old a token may be by then. No jax.

Weights are counted by the training step that starts from them: step s begins with version s. The
staleness of a token is (step that trains on it) - (version that sampled it), in updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from agentjax.config import Config, NonNegativeInt
from agentjax.trajectory.record import Trajectory

Key = TypeVar("Key")


@dataclasses.dataclass(unsafe_hash=True)
class ScheduleConfig(Config):
  """How sampling and updates take turns. Names and defaults are ours.

  Attributes:
    mode: "sync": sample a step's groups, train on them, and so on; every token has staleness 0.
      "one_step_off": while step s is trained, the groups of step s + 1 are sampled with the weights
      that step s began with; new weights wait for these groups to end. As reproducible as "sync".
      "async": groups begin whenever fewer than (staleness + 1) * tasks_per_step are running,
      running episodes get new weights, and a step takes the finished groups.
    staleness: bound on the staleness of a token, >= 0, in updates; set it with "async" only. 0 is
      the same as "sync".
    stale: what "async" does with slow groups. "wait": a step waits for the groups that would
      otherwise pass the bound; nothing is lost. "mask": no step waits, and tokens past the bound
      get no loss weight. "drop": groups that began more than ``staleness`` updates ago are
      cancelled, and new ones begin in their place.
  """

  mode: Literal["sync", "one_step_off", "async"] = "sync"
  staleness: NonNegativeInt | None = None
  stale: Literal["wait", "mask", "drop"] = "wait"

  @property
  def bound(self) -> int:
    """Largest staleness of a token that is trained on."""
    return {"sync": 0, "one_step_off": 1, "async": self.staleness or 0}[self.mode]

  @property
  def repeatable(self) -> bool:
    """Whether a step's groups, and all their bits, follow from the seed alone."""
    return self.mode != "async" or self.bound == 0

  def validate(self, path: str = "config.rl.schedule") -> None:
    super().validate(path)
    require = self.requirements(path)
    if self.mode == "async":
      require(self.staleness is not None, "staleness", f">= 0 updates with {path}.mode='async'")
    else:
      for name, default in (("staleness", None), ("stale", "wait")):
        require(
          getattr(self, name) == default,
          name,
          f"{default!r} with {path}.mode={self.mode!r}; it belongs to mode='async'",
        )


class StalenessError(RuntimeError):
  """A token past the bound was about to be trained on."""


class Pending(NamedTuple, Generic[Key]):
  """A group that has begun and was not trained on.

  Attributes:
    key: order among groups of one age.
    version: none of its tokens is of older weights.
    whole: whether all its episodes have ended.
  """

  key: Key
  version: int
  whole: bool


def choose(
  pending: Sequence[Pending[Key]], step: int, size: int, schedule: ScheduleConfig
) -> list[Key] | None:
  """The groups that ``step`` trains on, the oldest whole ones first; None where it has to wait.

  A group of version v can be trained on up to step v + bound. With "wait" the choice is allowed if
  all other groups can still be trained on in time: for every later step d, at most (d - step) *
  size groups that are due by d are left. At most (bound + 1) * size groups run, and new ones have
  the newest version, so such a choice exists once all have ended.
  """
  whole = sorted((p.version, p.key) for p in pending if p.whole)
  if len(whole) < size:
    return None
  chosen = whole[:size]
  if schedule.stale == "wait":
    taken = {key for _, key in chosen}
    left = sorted(p.version + schedule.bound for p in pending if p.key not in taken)
    for count, deadline in enumerate(left, 1):
      if count > (deadline - step) * size:
        return None
  return [key for _, key in chosen]


def bound_staleness(
  trajectories: Sequence[Trajectory], step: int, schedule: ScheduleConfig
) -> list[Trajectory]:
  """Copies whose tokens past the bound have no loss weight, where ``schedule.stale`` is "mask".

  Raises:
    StalenessError: a token with loss weight is past the bound and the schedule does not mask.
  """
  oldest = step - schedule.bound
  result = []
  for trajectory in trajectories:
    segments = []
    for segment in trajectory.segments:
      old = segment.sampled & (segment.versions < oldest) & (segment.weights > 0)
      if old.any():
        if schedule.stale != "mask":
          raise StalenessError(
            f"step {step}: the episode {trajectory.address} has tokens sampled with version "
            f"{segment.versions[old].min()}, {step - segment.versions[old].min()} updates ago; "
            f"config.rl.schedule allows {schedule.bound}."
          )
        weights = np.where(old, np.float32(0), segment.weights)
        segment = dataclasses.replace(segment, weights=weights)
      segments.append(segment)
    result.append(dataclasses.replace(trajectory, segments=segments))
  return result
