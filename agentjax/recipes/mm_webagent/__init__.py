"""MM-WebAgent (2604.15309): web pages that are planned, made, shown, scored and mended."""

from agentjax.recipes.mm_webagent.world import PageWorldConfig

__all__ = ["PageWorldConfig"]
