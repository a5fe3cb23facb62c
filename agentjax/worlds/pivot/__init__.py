"""The world "pivot"; see README.md."""

from agentjax.worlds.pivot.world import PivotWorldConfig

Settings = PivotWorldConfig

__all__ = ["PivotWorldConfig", "Settings"]
