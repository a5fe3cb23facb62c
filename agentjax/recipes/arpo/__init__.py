"""ARPO (2507.19849) and AEPO (2510.14545): episodes branch at turns with a high entropy."""

from agentjax.recipes.arpo.branching import BranchConfig, BranchSampler

__all__ = ["BranchConfig", "BranchSampler"]
