"""PPR: steps are judged by principles, and paid together with the outcome (ReNorm). No jax."""

from agentjax.recipes.ppr.principles import PrinciplesConfig

__all__ = ["PrinciplesConfig"]
