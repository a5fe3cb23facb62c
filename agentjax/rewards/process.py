r"""Process rewards: a number for every step of an episode. Nothing is trained.

* Monte-Carlo labels (Math-Shepherd, 2312.08935): from each step N completions are played; "hard" is
  1 if any of them succeeds, "soft" is the share that succeeds.
* Implicit rewards (PRIME, 2502.01456): ``r_t = beta (log pi_phi - log pi_ref)`` of the tokens
  taken, where pi_phi was trained only on outcomes (``objectives.preference``, preset
  "implicit_prm").
* Progress advantages (2606.26080): the same difference between the policy that reinforcement
  learning made and the one it started from recovers the optimal advantage; nothing else is
  trained.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from jaxtyping import Float


def monte_carlo_labels(
  successes: Float[np.ndarray, "steps completions"], kind: Literal["hard", "soft"]
) -> Float[np.ndarray, " steps"]:
  """Labels of the steps: "hard" 1 where any completion succeeded, "soft" the share of them.

  Args:
    successes: 0 or 1; NaN for a completion without a verdict, which is left out.
    kind: see above.

  Returns:
    One label a step; NaN where no completion has a verdict.
  """
  values = np.asarray(successes, np.float64)
  known = ~np.isnan(values)
  count, total = known.sum(axis=1), np.where(known, values, 0).sum(axis=1)
  label = (total > 0).astype(np.float64) if kind == "hard" else total / np.maximum(count, 1)
  return np.where(count > 0, label, np.nan)


def log_ratio_rewards(
  log_probs: Float[Any, "*shape"], reference_log_probs: Float[Any, "*shape"], *, beta: float
) -> Float[Any, "*shape"]:
  """``beta (log pi - log pi_ref)`` of the tokens taken, nats; of numpy's or jax's arrays.

  With pi a reward model trained on outcomes: implicit process rewards. With pi the policy after and
  pi_ref the one before reinforcement learning with KL weight beta: progress advantages.
  """
  if log_probs.shape != reference_log_probs.shape:
    raise ValueError(
      f"log-probs of one shape are needed, got {log_probs.shape} and {reference_log_probs.shape}."
    )
  return beta * (log_probs - reference_log_probs)
