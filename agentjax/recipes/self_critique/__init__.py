"""Kimi K2's self-critique rubric reward (2507.20534): the policy compares its own answers."""

from agentjax.recipes.self_critique.sampler import SelfCritiqueConfig

__all__ = ["SelfCritiqueConfig"]
