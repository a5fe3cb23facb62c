"""A part of the reward: what the length of an answer costs, more on easy problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.config import NonNegativeFloat, PositiveFloat, PositiveInt, check
from agentjax.recipes.grandcode.rewards import difficulty, length_penalty
from agentjax.recipes.grandcode.settings import SOLVER
from agentjax.rewards.graph import GroupScorer
from agentjax.rewards.scorer_config import GroupScorerConfig
from agentjax.rewards.scorers import sampled_tokens
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class AdaptiveLengthConfig(GroupScorerConfig):
  """A penalty by the difficulty of the problem, which the group shows; give the part weight -1.

  The level is that of the share of right answers in the group (``rewards.difficulty``). Only right
  answers pay: a wrong one must not be worth more for being short. All figures are ours.

  Attributes:
    part: of the reward that tells right answers. success: from here on one is right.
    agents: whose answers pay; () is all.
    budget: drawn tokens that cost nothing on the easiest problems.
    growth: factor of the budget from one level to the next.
    weight: of an answer of twice the budget or more.
  """

  part: str = "environment"
  success: PositiveFloat = 0.5
  agents: tuple[str, ...] = (SOLVER,)
  budget: PositiveInt = 512
  growth: PositiveFloat = 2.0
  weight: NonNegativeFloat = 0.2

  def validate(self, path: str = "adaptive_length") -> None:
    super().validate(path)
    check(self.growth >= 1, f"{path}.growth", self.growth, ">= 1")

  @property
  def needs(self) -> tuple[str, ...]:
    return (self.part,)

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    """See ``ScorerConfig.build``."""
    del sandboxes
    return adaptive_length(self)


def adaptive_length(config: AdaptiveLengthConfig) -> GroupScorer:
  """The scorer of a config. Without any verdict in the group nothing is known and nothing costs."""

  def score(members: Sequence[Trajectory], task: Task) -> list[Reward]:
    values = [one.reward_parts[config.part].value for one in members]
    known = [v for v in values if v is not None]
    if not known:
      return [Reward(0.0) for _ in members]
    level = difficulty(sum(v >= config.success for v in known) / len(known))
    return [
      Reward(
        length_penalty(
          sampled_tokens(one, task),
          level,
          budget=config.budget,
          weight=config.weight,
          growth=config.growth,
        )
        if value is not None and value >= config.success and _pays(one, config)
        else 0.0
      )
      for one, value in zip(members, values, strict=True)
    ]

  return score


def _pays(episode: Trajectory, config: AdaptiveLengthConfig) -> bool:
  agent = episode.segments[0].agent if episode.segments else ""
  return not config.agents or agent in config.agents
