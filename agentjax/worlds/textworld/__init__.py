"""The world "textworld"; see README.md."""

from agentjax.worlds.textworld.game import TextWorldConfig, TextWorldGame

Settings = TextWorldConfig

__all__ = ["Settings", "TextWorldConfig", "TextWorldGame"]
