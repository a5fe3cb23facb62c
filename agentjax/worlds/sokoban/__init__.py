"""The world "sokoban"; see README.md."""

from agentjax.worlds.sokoban.game import Sokoban, SokobanConfig, sokoban_tasks

Settings = SokobanConfig

__all__ = ["Sokoban", "SokobanConfig", "Settings", "sokoban_tasks"]
