"""iStar (OPRL): advantages of steps by a process reward model that learns from pairs in the run."""

from agentjax.recipes.istar.advantages import IStarAdvantages

__all__ = ["IStarAdvantages"]
