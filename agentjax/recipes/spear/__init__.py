"""SPEAR (2509.22601): first the use of tools is rewarded, then successes are imitated."""

from agentjax.recipes.spear.advantages import SpearAdvantages
from agentjax.recipes.spear.imitation import SpearConfig

__all__ = ["SpearAdvantages", "SpearConfig"]
