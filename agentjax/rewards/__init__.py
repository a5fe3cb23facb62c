"""Rewards: the graph of named parts, the scorers, and reading final answers. No jax."""

from agentjax.rewards.config import RewardConfig, build_rewards
from agentjax.rewards.graph import (
  Gate,
  GroupScorer,
  Largest,
  Part,
  Product,
  RewardGraph,
  Scorer,
  Smallest,
  WeightedSum,
)
from agentjax.rewards.scorers import SCORERS

__all__ = [
  "SCORERS",
  "Gate",
  "GroupScorer",
  "Largest",
  "Part",
  "Product",
  "RewardConfig",
  "RewardGraph",
  "Scorer",
  "Smallest",
  "WeightedSum",
  "build_rewards",
]
