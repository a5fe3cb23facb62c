"""GrandCode (2604.02721): seats that conjecture, solve, summarise and test; tests that separate."""

from agentjax.recipes.grandcode.lengths import AdaptiveLengthConfig
from agentjax.recipes.grandcode.one_problem import OneProblemConfig
from agentjax.recipes.grandcode.sampler import ChainConfig
from agentjax.recipes.grandcode.settings import SeatsConfig
from agentjax.recipes.grandcode.world import GrandCodeConfig, restarts

__all__ = [
  "AdaptiveLengthConfig",
  "ChainConfig",
  "GrandCodeConfig",
  "OneProblemConfig",
  "SeatsConfig",
  "restarts",
]
