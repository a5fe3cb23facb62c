"""AgentCPM-Explore (2602.06485): groups that say little and episodes that mislead are dropped."""

from agentjax.recipes.agentcpm.denoise import DenoiseConfig

__all__ = ["DenoiseConfig"]
