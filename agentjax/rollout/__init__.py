"""Rollout: episode programs, the collection loop, evaluation, and a readable view of both."""

from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.evaluation import (
  Estimate,
  EvaluationPlan,
  EvaluationReport,
  Scores,
  bootstrap,
  evaluate,
  pass_at_k,
  summarise,
)
from agentjax.rollout.keys import Address, environment_key, evaluation_seed, turn_key
from agentjax.rollout.loop import GroupPlayer, collect
from agentjax.rollout.program import (
  Episode,
  EpisodeEnd,
  EpisodeProgram,
  MakeEnvironment,
  Player,
  run_episode,
  tool_episode,
)
from agentjax.rollout.schedule import ScheduleConfig, StalenessError
from agentjax.rollout.statistics import (
  GroupDiversity,
  RolloutStatistics,
  StalenessStatistics,
  ToolStatistics,
  engine_metrics,
  group_diversity,
  rollout_statistics,
  staleness_statistics,
)
from agentjax.rollout.stream import GroupStream
from agentjax.rollout.viewer import render, write_trajectories

__all__ = [
  "Address",
  "Episode",
  "EpisodeEnd",
  "EpisodeProgram",
  "Estimate",
  "EvaluationPlan",
  "EvaluationReport",
  "GroupDiversity",
  "GroupPlayer",
  "GroupStream",
  "MakeEnvironment",
  "Player",
  "RolloutConfig",
  "RolloutStatistics",
  "ScheduleConfig",
  "Scores",
  "StalenessError",
  "StalenessStatistics",
  "ToolStatistics",
  "bootstrap",
  "collect",
  "engine_metrics",
  "environment_key",
  "evaluate",
  "evaluation_seed",
  "group_diversity",
  "pass_at_k",
  "render",
  "rollout_statistics",
  "run_episode",
  "staleness_statistics",
  "summarise",
  "tool_episode",
  "turn_key",
  "write_trajectories",
]
