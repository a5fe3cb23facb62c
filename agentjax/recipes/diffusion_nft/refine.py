"""Generate, critique, refine: a rationale edits the condition of a generator at test time.

Where the critic says that an aspect differs (grade 1, below the paper's limit of 3), the wanted
value gets more weight in the condition, and the value that the critic saw instead gets a negative
one. In words: "two red discs" becomes "two very red discs, not blue ones". One round, as published.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from agentjax.config import Config, NonNegativeFloat
from agentjax.recipes.diffusion_nft.critic import agreeing, seen_values
from agentjax.recipes.diffusion_nft.drawings import STARTS, UNCLEAR
from agentjax.recipes.diffusion_nft.generator import condition_of


@dataclasses.dataclass(unsafe_hash=True)
class RefineConfig(Config):
  """How a condition is edited. Both numbers are ours.

  Attributes:
    emphasis: added to the weight of a wanted value that the critic did not find.
    avoid: taken from the weight of the value that it saw instead.
  """

  emphasis: NonNegativeFloat = 0.5
  avoid: NonNegativeFloat = 0.5


def refine(
  prompts: Int[np.ndarray, "N A"], rationales: Int[np.ndarray, "N R"], config: RefineConfig
) -> Float[np.ndarray, "N V"]:
  """Conditions for the second images; those of images without a fault are as before."""
  condition = condition_of(prompts)
  fails = ~agreeing(rationales)
  seen = seen_values(rationales)
  rows, aspects = np.nonzero(fails)
  condition[rows, prompts[rows, aspects] + STARTS[aspects]] += config.emphasis
  named = fails & (seen != UNCLEAR) & (seen != prompts)
  rows, aspects = np.nonzero(named)
  condition[rows, seen[rows, aspects] + STARTS[aspects]] -= config.avoid
  return condition
