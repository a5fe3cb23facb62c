"""The world "repair"; see README.md."""

from agentjax.worlds.repair.environment import RepairWorldConfig

Settings = RepairWorldConfig

__all__ = ["RepairWorldConfig", "Settings"]
