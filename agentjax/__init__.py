"""agentjax: reinforcement learning for language-model agents, natively in JAX.

Importing this package imports no jax and starts no backend; names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from agentjax.engine import Engine, EngineConfig, SamplingConfig
  from agentjax.envs.environment import Action, Environment, Observation, Step
  from agentjax.models import ModelConfig
  from agentjax.objectives import AdvantageConfig, LossInputs, PolicyLossConfig
  from agentjax.tools import function_tool
  from agentjax.training import Experiment, Run
  from agentjax.trajectory.record import Message, Reward, Task, Trajectory

__version__ = "0.1.0"

_HOMES = {
    "Action": "agentjax.envs.environment",
    "AdvantageConfig": "agentjax.objectives",
    "Engine": "agentjax.engine",
    "EngineConfig": "agentjax.engine",
    "Environment": "agentjax.envs.environment",
    "Experiment": "agentjax.training",
    "LossInputs": "agentjax.objectives",
    "Message": "agentjax.trajectory.record",
    "ModelConfig": "agentjax.models",
    "Observation": "agentjax.envs.environment",
    "PolicyLossConfig": "agentjax.objectives",
    "Reward": "agentjax.trajectory.record",
    "Run": "agentjax.training",
    "SamplingConfig": "agentjax.engine",
    "Step": "agentjax.envs.environment",
    "Task": "agentjax.trajectory.record",
    "Trajectory": "agentjax.trajectory.record",
    "function_tool": "agentjax.tools",
}

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f"module 'agentjax' has no attribute {name!r}")
  return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
  return sorted(__all__)
