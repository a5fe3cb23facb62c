"""Agent-RLVR: where all fail, some try again with a hint, and learn as if there had been none."""

from agentjax.recipes.agent_rlvr.guided import GuidedConfig

__all__ = ["GuidedConfig"]
