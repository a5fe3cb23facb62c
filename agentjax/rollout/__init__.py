"""Rollout: episode programs, the collection loop, evaluation, and a readable view of both."""

from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.schedule import ScheduleConfig

__all__ = ["RolloutConfig", "ScheduleConfig", "collect"]
