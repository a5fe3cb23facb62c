"""KAT-Coder (2510.18779): conversations that share their beginning, as the branches of a tree."""

from agentjax.recipes.kat_coder.tree import TreeConfig, merge

__all__ = ["TreeConfig", "merge"]
