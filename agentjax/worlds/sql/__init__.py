"""The world "sql"; see README.md."""

from agentjax.worlds.sql.world import SqlWorldConfig

Settings = SqlWorldConfig

__all__ = ["SqlWorldConfig", "Settings"]
