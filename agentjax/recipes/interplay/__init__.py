"""On the interplay of pre-training, mid-training and RL (2512.07783): problems of so many
operations, and a reward of their steps. No jax."""

from agentjax.recipes.interplay.graph import GraphConfig
from agentjax.recipes.interplay.problems import GraphProblemConfig

__all__ = ["GraphConfig", "GraphProblemConfig"]
