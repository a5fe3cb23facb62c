"""SPA-RL (2505.20732): a network attributes the outcome of an episode to its turns."""

from agentjax.recipes.spa_rl.progress import ProgressConfig

__all__ = ["ProgressConfig"]
