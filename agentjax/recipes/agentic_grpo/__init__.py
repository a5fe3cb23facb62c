"""Agentic GRPO (2604.02721): a turn learns from its own reward, then from the final reward."""

from agentjax.recipes.agentic_grpo.live import LiveStagesConfig
from agentjax.recipes.agentic_grpo.stages import StagedConfig

__all__ = ["LiveStagesConfig", "StagedConfig"]
