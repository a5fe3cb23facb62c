"""How per-token losses become one number: one coefficient per token, computed once on the whole
batch.

The loss is ``sum(coefficients * per_token)``. Because the denominators are already inside, the sum
over micro-batches, shards and accumulation steps is the loss of the whole batch, exactly.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentjax.objectives.segments import broadcast_to_tokens, sequence_sum

Aggregation = Literal[
  "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
]


def token_coefficients(
  weights: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  num_sequences: int,
  *,
  mode: Aggregation,
  constant: float | None = None,
) -> Float[Array, "batch time"]:
  r"""Coefficient of every token of the whole batch.

  With weights ``w``, ``S`` the number of sequences that have any weight:

  * ``token_mean``: ``w / sum(w)`` (DAPO, 2503.14476);
  * ``sequence_mean_token_mean``: ``w / (S sum_sequence(w))`` (GRPO, 2402.03300);
  * ``sequence_mean_token_sum``: ``w / S`` (REINFORCE on sequences);
  * ``constant``: ``w / (S constant)``, constant in tokens (Dr.GRPO, 2503.20783).

  A batch without weight gives zeros, not NaN.

  Args:
    weights: loss weights, >= 0; filtered and invalid tokens already 0.
    segment_ids: 0 on padding, else 1 + index of the sequence in the whole batch.
    num_sequences: N, static.
    mode: see above.
    constant: denominator in tokens, for "constant" only.
  """
  if (mode == "constant") != (constant is not None):
    raise ValueError(
      f'mode={mode!r} with constant={constant!r}: "constant" needs a number of tokens and the '
      "other modes take none."
    )
  if mode == "token_mean":
    return divide(weights, jnp.sum(weights))
  totals = sequence_sum(weights, segment_ids, num_sequences)
  live = jnp.sum(totals > 0).astype(weights.dtype)
  if mode == "sequence_mean_token_mean":
    return divide(weights, live * broadcast_to_tokens(totals, segment_ids))
  if mode == "sequence_mean_token_sum":
    return divide(weights, live)
  if constant is not None:
    return divide(weights, live * constant)
  raise ValueError(
    f'mode={mode!r}; allowed: "token_mean", "sequence_mean_token_mean", '
    '"sequence_mean_token_sum", "constant".'
  )


def divide(numerator: Array, denominator: Array) -> Array:
  """The quotient; 0 where the denominator is not positive."""
  positive = denominator > 0
  return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), 0)
