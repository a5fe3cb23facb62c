"""Parts of a reward that depend on the length of an episode, alone or beside its group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from agentjax.config import PositiveFloat, PositiveInt, check
from agentjax.rewards.graph import GroupScorer, Scorer
from agentjax.rewards.scorer_config import GroupScorerConfig, ScorerConfig
from agentjax.rewards.scorers import sampled_tokens
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class OverlongConfig(ScorerConfig):
  """Penalty for too long episodes; give the part weight 1. DAPO (2503.14476) has 20480, 4096 and 1.

  Attributes:
    limit: L, drawn tokens at which the whole penalty is due.
    buffer: B, tokens before the limit over which it grows.
    penalty: p, its size.
  """

  limit: PositiveInt = 20480
  buffer: int = 4096
  penalty: PositiveFloat = 1.0

  def validate(self, path: str = "config.reward.settings.overlong") -> None:
    super().validate(path)
    check(1 <= self.buffer <= self.limit, f"{path}.buffer", self.buffer, f"1 to limit {self.limit}")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    return overlong(self)


def overlong(config: OverlongConfig) -> Scorer:
  """DAPO's soft penalty ``min(-(length - (L - B)) / B * p, 0)``; give it weight 1.

  The length counts the tokens that the policy drew. The penalty keeps growing past the limit.
  """

  def score(trajectory: Trajectory, task: Task) -> float:
    over = sampled_tokens(trajectory, task) - (config.limit - config.buffer)
    return min(-over / config.buffer * config.penalty, 0.0)

  return score


def tool_calls(trajectory: Trajectory, task: Task) -> float:
  """Number of tool calls. Weigh it negatively for a cost."""
  del task
  return float(len(trajectory.tools))


def seconds(trajectory: Trajectory, task: Task) -> float:
  """Seconds that the tool calls took. Weigh it negatively for a cost."""
  del task
  return float(sum(record.seconds for record in trajectory.tools))


Form = Literal["range", "rank", "place", "z_score"]


@dataclasses.dataclass(unsafe_hash=True)
class RelativeConfig(GroupScorerConfig):
  """How large another part of the reward is beside the group, such as the length of an episode.

  ``0.5 - relative`` is the length reward of Kimi k1.5 (2501.12599), which wrong answers get only
  where it is below 0: ``exact_match + (0.5 - relative if exact_match >= 1 else min(0, 0.5 -
  relative))``. Give the part that is compared weight 0, or leave it out of the formula.

  Attributes:
    part: what is compared, among ``config.reward.parts``: "sampled_tokens", "turns", "tool_calls",
      "seconds" or any other.
    form: "range": 0 for the lowest of the group, 1 for the highest; "rank": share of the group that
      is lower, itself and equal ones counting half; "place": 0 for the lowest, 1 for the highest,
      the others by their rank at even distances, equal ones in the middle of theirs; "z_score":
      distance to the mean in standard deviations (population), 0 where all are equal. The others
      are 0.5 there.
    among: a part of the reward; those in which it is 1 or more are compared with one another, and
      so are the others. "" compares all.
  """

  part: str = "sampled_tokens"
  form: Form = "range"
  among: str = ""

  @property
  def needs(self) -> tuple[str, ...]:
    return tuple(filter(None, (self.part, self.among)))

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    """See ``ScorerConfig.build``."""
    return relative(self)


def relative(config: RelativeConfig) -> GroupScorer:
  """The scorer of a config; an episode without a value of one of the parts has none here."""

  def score(members: Sequence[Trajectory], task: Task) -> list[Reward]:
    values = [[member.reward_parts[name].value for name in config.needs] for member in members]
    kinds = [_kind(own, config) for own in values]
    result = []
    for own, kind in zip(values, kinds, strict=True):
      if kind is None:
        result.append(Reward.invalid(f"no value of {' or '.join(config.needs)}"))
        continue
      beside = [v[0] for v, other in zip(values, kinds, strict=True) if other == kind]
      result.append(Reward(place(float(own[0] or 0.0), np.array(beside, np.float64), config.form)))
    return result

  return score


def _kind(values: Sequence[float | None], config: RelativeConfig) -> bool | None:
  """Episodes of one kind are compared with one another; None is one that lacks a value."""
  known = [value for value in values if value is not None]
  if len(known) < len(values):
    return None
  return bool(config.among) and known[-1] >= 1


def place(value: float, values: np.ndarray, form: Form) -> float:
  """Where a value lies among several, of which it is one; see ``RelativeConfig.form``."""
  low, high = float(values.min()), float(values.max())
  if form == "rank":
    return float(np.mean(values < value) + np.mean(values == value) / 2)
  if low == high:
    return 0.0 if form == "z_score" else 0.5
  if form == "place":
    lower, equal = np.sum(values < value), np.sum(values == value)
    return float(lower + (equal - 1) / 2) / (len(values) - 1)
  if form == "range":
    return (value - low) / (high - low)
  return float((value - values.mean()) / values.std())
