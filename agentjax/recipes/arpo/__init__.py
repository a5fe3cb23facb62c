"""ARPO (2507.19849) and AEPO (2510.14545): episodes branch off where the policy is unsure."""

from agentjax.recipes.arpo.branching import BranchConfig, BranchSampler

__all__ = ["BranchConfig", "BranchSampler"]
