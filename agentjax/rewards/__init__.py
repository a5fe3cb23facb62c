"""Rewards: the graph of named parts, the scorers, and reading final answers. No jax."""

from agentjax.rewards.config import RewardConfig, build_rewards
from agentjax.rewards.graph import (
  Combined,
  Gate,
  GroupScorer,
  Part,
  RewardGraph,
  Scorer,
  TurnScores,
  WeightedSum,
)
from agentjax.rewards.monitor import MONITORS, Monitor, MonitorConfig
from agentjax.rewards.samples import SampleConfig, top_rewards, write_samples
from agentjax.rewards.scorers import SCORERS

__all__ = [
  "MONITORS",
  "SCORERS",
  "Combined",
  "Gate",
  "GroupScorer",
  "Monitor",
  "MonitorConfig",
  "Part",
  "RewardConfig",
  "RewardGraph",
  "SampleConfig",
  "Scorer",
  "TurnScores",
  "WeightedSum",
  "build_rewards",
  "top_rewards",
  "write_samples",
]
