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
from agentjax.trajectory.batch import Batch

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

ScoreTokens = Callable[..., TokenScores]
"""``(params, config, token_ids, segment_ids, positions, *, marks, temperature)`` [B, T] to scores.

``marks`` int32 [B, T] are those of ``LikelihoodConfig.marks``; tokens without weight need no score.
"""


@dataclasses.dataclass(unsafe_hash=True)
class LikelihoodConfig(Choice):
  """How tokens are scored in updates, and how they are drawn. This base is from left to right."""

  group = "agentjax.likelihoods"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {"left_to_right": "agentjax.training.likelihood:LikelihoodConfig"}

  @property
  def in_order(self) -> bool:
    """Whether tokens are drawn and scored from left to right, so that both can be compared."""
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

    The same marks give the same result, so that ratios compare the same draws.
    """

  def marks(self, batch: Batch) -> Int[Array, "batch time"]:
    """What ``episodes`` needs to know of each token of a batch; by default its noise."""
    return noise_of(batch.weights)

  def engine(self, model: ModelConfig, config: EngineConfig, chat: Chat, **options: Any) -> Engine:
    """What draws tokens; ``options`` are those of ``Engine``."""
    return Engine(model, config, **options)


def noise_of(
  weights: Float[Array, "batch time"], number: int | Array = 1
) -> Int[Array, "batch time"]:
  """0 on tokens without weight, which are only read; ``number`` on others: it addresses their
  noise."""
  return jnp.where(weights > 0, jnp.asarray(number, jnp.int32), 0)
