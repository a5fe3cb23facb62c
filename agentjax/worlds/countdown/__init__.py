"""The world "countdown"; see README.md."""

from agentjax.worlds.countdown.game import Countdown, CountdownConfig, countdown_tasks

Settings = CountdownConfig

__all__ = ["Countdown", "CountdownConfig", "Settings", "countdown_tasks"]
