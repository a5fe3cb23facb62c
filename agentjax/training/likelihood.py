"""How likely a policy finds its tokens: from left to right, or otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
"""``(params, config, token_ids, segment_ids, positions, *, noise, temperature)`` [B, T] to the
scores of every token whose ``noise`` is not 0 (``noise_of``)."""


@dataclasses.dataclass(unsafe_hash=True)
class LikelihoodConfig(Choice):
  """How tokens are scored in updates, and how they are drawn. This base is from left to right."""

  group = "agentjax.likelihoods"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {"left_to_right": "agentjax.training.likelihood:LikelihoodConfig"}

  @property
  def in_order(self) -> bool:
    """Whether it is from left to right."""
    return type(self) is LikelihoodConfig

  @property
  def align(self) -> int:
    """Every sequence starts at a multiple of it in its row."""
    return 1

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Raises ConfigError for a run that it does not fit; ``path`` names these settings."""

  def demonstrations(self, model: ModelConfig, chat: Chat) -> ScoreTokens | None:
    """The supervised loss is ``-log_probs`` of it; None is ``score_tokens``."""

  def episodes(self, model: ModelConfig, chat: Chat) -> ScoreTokens | None:
    """Scores sampled tokens; None is ``score_tokens``.

    One noise gives one result, so that ratios compare the same draws.
    """

  def engine(self, model: ModelConfig, config: EngineConfig, chat: Chat, **options: Any) -> Engine:
    """What draws tokens; ``options`` are those of ``Engine``."""
    return Engine(model, config, **options)


def noise_of(
  weights: Float[Array, "batch time"], number: int | Array = 1
) -> Int[Array, "batch time"]:
  """0 on tokens without weight, which are only read; ``number`` on others: it addresses their
  noise."""
  return jnp.where(weights > 0, jnp.asarray(number, jnp.int32), 0)
