"""PRIME (2502.01456): rewards of steps from the log-probs of two policies
(``config.rl.process``)."""

from agentjax.recipes.prime.rewards import OnlineConfig, ProcessConfig, ProcessRewards

__all__ = ["OnlineConfig", "ProcessConfig", "ProcessRewards"]
