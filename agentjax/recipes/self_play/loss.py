"""Self-play preference optimisation, 2405.00675; not to be confused with sequence-level PPO."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.objectives.objective import LossInputs
from agentjax.objectives.segments import sequence_units, unit_sum


def self_play_preference(inputs: LossInputs) -> Float[Array, "batch time"]:
  """``(log (pi(y|x) / pi_t(y|x)) - eta (P(y beats pi_t | x) - 1/2))^2`` of the sequence, a token.

  With ``aggregation="sequence_mean_token_mean"`` the sum is the mean over sequences. ``pi_t`` is
  the policy at the start of the update, and the target are the advantages: centre "win_rate" times
  ``multiplier`` eta. On policy the gradient is ``-2 eta (P - 1/2) grad log pi(y|x)``. With several
  ``minibatches`` or ``epochs`` log-ratios approach their targets, which other methods do not have.

  Args:
    inputs: log-probs, old log-probs and advantages, 0 on tokens without weight.
  """
  log_ratio = unit_sum(inputs.log_probs - inputs.old_log_probs, sequence_units(inputs.segment_ids))
  return jnp.square(log_ratio - inputs.advantages)
