"""Tree search over turns: the members of a group are the most valuable leaves."""

from agentjax.recipes.tree_search.search import Node, TreeConfig, TreeSearch

__all__ = ["Node", "TreeConfig", "TreeSearch"]
