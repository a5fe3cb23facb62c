"""The world "mle"; see README.md."""

from agentjax.worlds.mle.environment import MleWorldConfig

Settings = MleWorldConfig

__all__ = ["MleWorldConfig", "Settings"]
