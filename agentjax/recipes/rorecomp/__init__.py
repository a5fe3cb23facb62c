"""RoRecomp (2509.25958): updates on recomposed batches teach a policy to be brief."""

from agentjax.recipes.rorecomp.recomposition import RecompositionConfig

__all__ = ["RecompositionConfig"]
