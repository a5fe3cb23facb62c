"""The reinforcement learning of Nemotron 3 Super (2604.12374): its stages with their constants."""

from agentjax.recipes.nemotron3.credit import (
  LeaveOneOut,
  MessageFaultsConfig,
  MessageTerm,
)
from agentjax.recipes.nemotron3.stages import PUBLISHED, change, heal_prediction_heads

__all__ = [
  "PUBLISHED",
  "LeaveOneOut",
  "MessageFaultsConfig",
  "MessageTerm",
  "change",
  "heal_prediction_heads",
]
