"""MoClip (2510.09152): an optimiser that caps how far a gradient turns from its momentum."""

from agentjax.recipes.moclip.optimizer import MoClipConfig

__all__ = ["MoClipConfig"]
