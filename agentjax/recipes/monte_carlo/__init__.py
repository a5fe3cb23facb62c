"""VinePPO (2410.01679) and Math-Shepherd (2312.08935): completions say what turns were worth."""

from agentjax.recipes.monte_carlo.sampler import MonteCarlo, MonteCarloConfig

__all__ = ["MonteCarlo", "MonteCarloConfig"]
