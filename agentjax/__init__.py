"""agentjax: reinforcement learning for language-model agents, natively in JAX.

Importing this package imports no jax and starts no backend; names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from agentjax.data import TaskSplits
  from agentjax.engine import Engine, EngineConfig, SamplingConfig
  from agentjax.models import ModelConfig, load_pretrained, save_pretrained
  from agentjax.objectives import AdvantageConfig, LossInputs, ObjectiveConfig, PolicyLossConfig
  from agentjax.rollout import RolloutConfig
  from agentjax.tools import function_tool
  from agentjax.training import Experiment, Extensions, Run, load_experiment
  from agentjax.trajectory.record import Message, Reward, Task, Trajectory
  from agentjax.world.environment import Action, Environment, Observation, Step

__version__ = "0.1.0"

__all__ = [
  "Action",
  "AdvantageConfig",
  "Engine",
  "EngineConfig",
  "Environment",
  "Experiment",
  "Extensions",
  "LossInputs",
  "Message",
  "ModelConfig",
  "ObjectiveConfig",
  "Observation",
  "PolicyLossConfig",
  "Reward",
  "RolloutConfig",
  "Run",
  "SamplingConfig",
  "Step",
  "Task",
  "TaskSplits",
  "Trajectory",
  "function_tool",
  "load_experiment",
  "load_pretrained",
  "save_pretrained",
]

_HOMES = {
  "agentjax.data": ("TaskSplits",),
  "agentjax.engine": ("Engine", "EngineConfig", "SamplingConfig"),
  "agentjax.world.environment": ("Action", "Environment", "Observation", "Step"),
  "agentjax.models": ("ModelConfig", "load_pretrained", "save_pretrained"),
  "agentjax.objectives": ("AdvantageConfig", "LossInputs", "ObjectiveConfig", "PolicyLossConfig"),
  "agentjax.rollout": ("RolloutConfig",),
  "agentjax.tools": ("function_tool",),
  "agentjax.training": ("Experiment", "Extensions", "Run", "load_experiment"),
  "agentjax.trajectory.record": ("Message", "Reward", "Task", "Trajectory"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module 'agentjax' has no attribute {name!r}")
  return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
  return __all__
