"""PRIME (2502.01456): what two policies think of steps is their reward (``config.rl.process``)."""

from agentjax.recipes.prime.rewards import OnlineConfig, ProcessConfig, ProcessRewards

__all__ = ["OnlineConfig", "ProcessConfig", "ProcessRewards"]
