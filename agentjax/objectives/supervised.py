"""Weighted negative log-likelihood: supervised warm start, self-imitation, best-of-n."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.config import Config
from agentjax.objectives.aggregation import Aggregation
from agentjax.objectives.objective import LossInputs


@dataclasses.dataclass(unsafe_hash=True)
class SupervisedConfig(Config):
  """Attributes:
    aggregation: see ``aggregation.token_coefficients``.
  """

  aggregation: Aggregation = "token_mean"


def negative_log_likelihood(
    log_probs: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """``-log pi`` where the weight is positive, else 0; nats a token, unreduced and unweighted."""
  return jnp.where(weights > 0, -log_probs, 0)


def supervised_objective(inputs: LossInputs) -> tuple[Array, dict[str, Array]]:
  """``-sum(c log pi)``. The weight pipeline says which tokens are taught, and how much."""
  per_token = negative_log_likelihood(inputs.log_probs, inputs.weights)
  return jnp.sum(inputs.coefficients * per_token), {
      "nll": jnp.sum(inputs.shares * per_token),
      "entropy": jnp.sum(inputs.shares * inputs.entropies),
  }
