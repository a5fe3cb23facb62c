"""Labels for promise Q and progress A by temporal differences and GAE, instead of Monte Carlo."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def promise_and_progress(
  values: Float[Array, "batch time"],
  rewards: Float[Array, "batch time"],
  ends: Bool[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  *,
  gamma: float,
  gae_lambda: float,
) -> tuple[Float[Array, "batch time"], Float[Array, "batch time"]]:
  """AgentPRM's labels of turns: promise ``Q_k = A_k + V_k`` and progress ``A_k``.

  ``A_k = sum_j (gamma lambda)^j d_{k+j}`` with ``d_k = r_k + gamma V_{k+1} - V_k`` and V = 0 after
  the last turn of a sequence.

  Args:
    values: the present model's V before a turn, at the turn's end.
    rewards: of a turn, at its end; usually the outcome at the last and 0 before.
    ends: where a turn ends; what is elsewhere is not read.
    segment_ids: sequences of a row.

  Returns:
    Both at the ends of turns, 0 elsewhere.
  """

  def earlier(after: tuple[Array, Array, Array], here: tuple[Array, ...]) -> tuple[tuple, Array]:
    segment, following, running = after
    value, reward, end, own = here
    same = own == segment
    error = reward + gamma * jnp.where(same, following, 0) - value
    progress = error + gamma * gae_lambda * jnp.where(same, running, 0)
    now = own, value, progress
    carried = tuple(jnp.where(end, new, old) for new, old in zip(now, after, strict=True))
    return carried, jnp.where(end, progress, 0)

  rows = values.shape[0]
  nothing = jnp.zeros(rows, segment_ids.dtype), jnp.zeros(rows), jnp.zeros(rows)
  by_time = tuple(x.T for x in (values, rewards, ends, segment_ids))
  progress = jax.lax.scan(earlier, nothing, by_time, reverse=True)[1].T
  return jnp.where(ends, progress + values, 0), progress
