"""How a policy says how likely its tokens are, where that is not from left to right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentjax.engine import Engine, EngineConfig
from agentjax.models import ModelConfig, TokenScores
from agentjax.names import Choice
from agentjax.text import Chat

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

ScoreTokens = Callable[..., TokenScores]
"""``(params, config, token_ids, segment_ids, positions, noise, *, temperature)`` [B, T] to the
scores of every token whose ``noise`` is not 0 (``noise_of``)."""


@dataclasses.dataclass(unsafe_hash=True)
class LikelihoodConfig(Choice):
  """Settings of a likelihood: how tokens are scored in updates, and how they are drawn.

  Attributes:
    align: every sequence starts at a multiple of it in its row.
  """

  group = "agentjax.likelihoods"

  @property
  def align(self) -> int:
    return 1

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Raises ConfigError for a run that it does not fit; ``path`` names these settings."""

  def demonstrations(self, model: ModelConfig, chat: Chat) -> ScoreTokens:
    """What the supervised stage learns from: its loss is ``-log_probs``."""
    raise NotImplementedError(f"{type(self).__name__} must define demonstrations()")

  def episodes(self, model: ModelConfig, chat: Chat) -> ScoreTokens:
    """Log-probs of sampled tokens. One noise gives one result: ratios compare the same draws."""
    raise NotImplementedError(f"{type(self).__name__} must define episodes()")

  def engine(self, model: ModelConfig, config: EngineConfig, **options: Any) -> Engine:
    """What draws tokens in the place of ``Engine``; ``options`` are those of ``Engine``."""
    raise NotImplementedError(f"{type(self).__name__} must define engine()")


def noise_of(
  weights: Float[Array, "batch time"], number: int | Array = 1
) -> Int[Array, "batch time"]:
  """0 on tokens without weight, which are only read; ``number`` on others: it addresses their
  noise."""
  return jnp.where(weights > 0, jnp.asarray(number, jnp.int32), 0)
