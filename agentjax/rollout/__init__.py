"""Rollout: episode programs, the collection loop, evaluation, and a readable view of both."""

from agentjax.rollout.branching import (
  BranchSampler,
  branch_probability,
  entropy_budget,
  entropy_delta,
  probe_entropy,
)
from agentjax.rollout.config import (
  BranchConfig,
  MonteCarloConfig,
  OversampleConfig,
  RolloutConfig,
)
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
from agentjax.rollout.group import Group, Sampler
from agentjax.rollout.keys import Address, environment_key, evaluation_seed, turn_key
from agentjax.rollout.loop import GroupPlayer, collect
from agentjax.rollout.program import (
  BranchPoint,
  Episode,
  EpisodeEnd,
  EpisodeProgram,
  MakeEnvironment,
  Player,
  TurnWatcher,
  run_episode,
  tool_episode,
)
from agentjax.rollout.samplers import Oversample, build_sampler
from agentjax.rollout.schedule import ScheduleConfig, StalenessError
from agentjax.rollout.statistics import (
  GroupDiversity,
  RolloutStatistics,
  StalenessStatistics,
  ToolStatistics,
  group_diversity,
  rollout_statistics,
  staleness_statistics,
)
from agentjax.rollout.stream import GroupStream
from agentjax.rollout.tree import Node, TreeConfig, TreeSearch
from agentjax.rollout.viewer import render, write_trajectories

__all__ = [
  "Address",
  "BranchConfig",
  "BranchPoint",
  "BranchSampler",
  "Episode",
  "EpisodeEnd",
  "EpisodeProgram",
  "Estimate",
  "EvaluationPlan",
  "EvaluationReport",
  "Group",
  "GroupDiversity",
  "GroupPlayer",
  "GroupStream",
  "MakeEnvironment",
  "Node",
  "Oversample",
  "MonteCarloConfig",
  "OversampleConfig",
  "Player",
  "RolloutConfig",
  "RolloutStatistics",
  "Sampler",
  "ScheduleConfig",
  "Scores",
  "StalenessError",
  "StalenessStatistics",
  "ToolStatistics",
  "TreeConfig",
  "TreeSearch",
  "TurnWatcher",
  "bootstrap",
  "branch_probability",
  "build_sampler",
  "collect",
  "entropy_budget",
  "entropy_delta",
  "environment_key",
  "evaluate",
  "evaluation_seed",
  "group_diversity",
  "pass_at_k",
  "probe_entropy",
  "render",
  "rollout_statistics",
  "run_episode",
  "staleness_statistics",
  "summarise",
  "tool_episode",
  "turn_key",
  "write_trajectories",
]
