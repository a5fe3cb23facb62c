"""Parts of a reward that depend on the form of an episode."""

from __future__ import annotations

import dataclasses

from agentjax.config import PositiveFloat, PositiveInt, check
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.rewards.scorers import sampled_tokens
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Task, Trajectory


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
