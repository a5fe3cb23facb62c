"""Labels for promise Q and progress A by temporal differences and GAE, instead of Monte Carlo."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def promise_and_progress(
  values: Float[np.ndarray, " steps"],
  rewards: Float[np.ndarray, " steps"],
  *,
  gamma: float = 1.0,
  gae_lambda: float = 0.95,
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
  """AgentPRM's labels: promise ``Q_t = A_t + V_t`` and progress ``A_t``.

  ``A_t = sum_k (gamma lambda)^k d_{t+k}`` with ``d_t = r_t + gamma V_{t+1} - V_t`` and V = 0 after
  the last step. The defaults are ours; the source's are not known to us.

  Args:
    values: the present model's V before each step of one rollout.
    rewards: of each step; usually the outcome at the last and 0 before.
  """
  before, paid = np.asarray(values, np.float64), np.asarray(rewards, np.float64)
  if before.shape != paid.shape:
    raise ValueError(f"values and rewards need one shape, got {before.shape} and {paid.shape}.")
  after = np.append(before[1:], 0.0) if before.size else before
  error = paid + gamma * after - before
  progress = np.zeros_like(before)
  running = 0.0
  for t in reversed(range(before.size)):
    running = error[t] + gamma * gae_lambda * running
    progress[t] = running
  return progress + before, progress
