"""The world "code"; see README.md."""

from agentjax.worlds.code.environment import CodeWorldConfig

Settings = CodeWorldConfig

__all__ = ["CodeWorldConfig", "Settings"]
