"""VinePPO (2410.01679) and Math-Shepherd (2312.08935): values of turns from completions."""

from agentjax.recipes.monte_carlo.sampler import MonteCarlo, MonteCarloConfig

__all__ = ["MonteCarlo", "MonteCarloConfig"]
