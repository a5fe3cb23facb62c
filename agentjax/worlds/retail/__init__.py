"""The world "retail"; see README.md."""

from agentjax.worlds.retail.world import RetailConfig

Settings = RetailConfig

__all__ = ["RetailConfig", "Settings"]
