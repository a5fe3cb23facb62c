"""The loss of a model that predicts the promise of a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def promise_progress_loss(
  promises: Float[Array, "*steps"],
  previous: Float[Array, "*steps"],
  promise_labels: Float[Array, "*steps"],
  progress_labels: Float[Array, "*steps"],
  *,
  beta: float,
) -> Float[Array, "*steps"]:
  r"""AgentPRM's ``(q_t - Q_t)^2 + beta ((q_t - q_{t-1}) - A_t)^2``, one a step.

  The source gives ``L = L_Q + beta L_A`` without beta. That progress is the difference of two
  promises, and that both terms are squares, is our reading.

  Args:
    promises, previous: the model's q of this step and of the one before (0 at the first).
    promise_labels, progress_labels: of ``agent_prm.labels.promise_and_progress``.
    beta: weight of progress.

  References:
    AgentPRM, 2511.08325.
  """
  promised = jnp.square(promises - jax.lax.stop_gradient(promise_labels))
  progressed = jnp.square(promises - previous - jax.lax.stop_gradient(progress_labels))
  return promised + beta * progressed
