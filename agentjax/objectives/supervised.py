"""Weighted negative log-likelihood: supervised warm start, self-imitation, best-of-n."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.objectives.objective import LossInputs


def negative_log_likelihood(
  log_probs: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """``-log pi`` where the weight is positive, else 0; nats a token, unreduced and unweighted."""
  return jnp.where(weights > 0, -log_probs, 0)


def supervised_objective(inputs: LossInputs) -> tuple[Array, dict[str, Array]]:
  """``-sum(c log pi)``. Loss weights say which tokens are learned, and how much."""
  per_token = negative_log_likelihood(inputs.log_probs, inputs.weights)
  entropies = jnp.where(inputs.weights > 0, inputs.entropies, 0)
  return jnp.sum(inputs.coefficients * per_token), {
    "nll": jnp.sum(inputs.shares * per_token),
    "entropy": jnp.sum(inputs.shares * entropies),
  }
