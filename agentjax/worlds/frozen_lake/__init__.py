"""The world "frozen_lake"; see README.md."""

from agentjax.worlds.frozen_lake.game import FrozenLake, FrozenLakeConfig, frozen_lake_tasks

Settings = FrozenLakeConfig

__all__ = ["FrozenLake", "FrozenLakeConfig", "Settings", "frozen_lake_tasks"]
