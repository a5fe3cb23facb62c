"""Behavior Priming: a warm start on trajectories that show four behaviours, right or wrong. No
jax."""

from agentjax.recipes.behavior_priming.selection import BEHAVIOURS, select

__all__ = ["BEHAVIOURS", "select"]
