"""SPEAR (2509.22601): first tools are tried for their own sake, then successes are imitated."""

from agentjax.recipes.spear.advantages import SpearAdvantages
from agentjax.recipes.spear.imitation import SpearConfig

__all__ = ["SpearAdvantages", "SpearConfig"]
