"""RL for machine-learning engineering (2509.01684): some prompts begin from a solution."""

from agentjax.recipes.rl4mle.improve import ImproveConfig

__all__ = ["ImproveConfig"]
