"""SemaClaw (2604.11548): a team whose tasks are a graph, permissions, and three tiers of memory."""

from agentjax.recipes.semaclaw.context import WindowConfig
from agentjax.recipes.semaclaw.permissions import AccessConfig
from agentjax.recipes.semaclaw.team import TeamWorldConfig
from agentjax.recipes.semaclaw.work import HandInConfig

__all__ = ["AccessConfig", "HandInConfig", "TeamWorldConfig", "WindowConfig"]
