"""Math-Shepherd (2312.08935): labels of steps by completions that are played from them."""

from agentjax.recipes.math_shepherd.scorer import MathShepherdConfig

__all__ = ["MathShepherdConfig"]
