"""Rewards: the graph of named parts, the scorers, and reading final answers. No jax."""

from agentjax.rewards.config import RewardConfig, build_rewards
from agentjax.rewards.formula import Formula
from agentjax.rewards.graph import GroupScorer, RewardGraph, Scorer, TurnScores
from agentjax.rewards.monitor import MONITORS, Monitor, MonitorConfig
from agentjax.rewards.samples import SampleConfig, top_rewards, write_samples
from agentjax.rewards.scorers import SCORERS

__all__ = [
  "MONITORS",
  "SCORERS",
  "Formula",
  "GroupScorer",
  "Monitor",
  "MonitorConfig",
  "RewardConfig",
  "RewardGraph",
  "SampleConfig",
  "Scorer",
  "TurnScores",
  "build_rewards",
  "top_rewards",
  "write_samples",
]
