"""The world "bandit"; see README.md."""

from agentjax.worlds.bandit.game import Bandit, BanditConfig, bandit_tasks

Settings = BanditConfig

__all__ = ["Bandit", "BanditConfig", "Settings", "bandit_tasks"]
