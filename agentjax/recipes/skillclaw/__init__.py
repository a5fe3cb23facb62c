"""SkillClaw (2604.08377): skills of agents that evolve by night from what was done by day."""

from agentjax.recipes.skillclaw.prm import PrmConfig
from agentjax.recipes.skillclaw.world import SkillWorldConfig

__all__ = ["PrmConfig", "SkillWorldConfig"]
