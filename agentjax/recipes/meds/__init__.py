"""MEDS (2604.11297): a wrong answer that repeats an earlier mistake costs more."""

from agentjax.recipes.meds.mistakes import MedsConfig

__all__ = ["MedsConfig"]
