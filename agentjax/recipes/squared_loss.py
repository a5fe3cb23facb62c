"""A squared loss on the log-ratio of whole sequences: self-play preference, and Kimi's."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.objectives.objective import LossInputs
from agentjax.objectives.segments import sequence_units, unit_sum


def squared_log_ratio(inputs: LossInputs) -> Float[Array, "batch time"]:
  """``(log (pi(y|x) / pi_t(y|x)) - A)^2`` of the sequence, on every token; for
  ``objective.function``.

  With ``aggregation="sequence_mean_token_mean"`` the sum is the mean over sequences. ``pi_t`` is
  the policy at the start of the update. On policy the gradient is ``-2 A grad log pi(y|x)``. With
  several ``minibatches`` or ``epochs`` log-ratios approach their targets, which other methods do
  not have.

  * Self-play preference optimisation (2405.00675): ``A = eta (P(y beats pi_t | x) - 1/2)``, by
    centre "win_rate" and ``multiplier`` eta.
  * Kimi k1.5 and K2 (2501.12599, 2507.20534): ``(r - mean r - tau log ratio)^2`` is tau^2 times
    this with ``A = (r - mean r) / tau``, by scale "none" and ``multiplier`` 1 / tau.

  Args:
    inputs: log-probs, old log-probs and advantages, 0 on tokens without weight.
  """
  log_ratio = unit_sum(inputs.log_probs - inputs.old_log_probs, sequence_units(inputs.segment_ids))
  return jnp.square(log_ratio - inputs.advantages)
