"""Advantages against the median of the others of a group."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.objectives.advantage_function import AdvantageChoice, AdvantageInputs
from agentjax.objectives.segments import broadcast_to_tokens


@dataclasses.dataclass(unsafe_hash=True)
class OthersMedian(AdvantageChoice):
  """``A_i = R_i - median of the other members' rewards``, on all tokens of the episode.

  A median leaves out what one extreme reward does to a mean, and leaving itself out keeps the
  estimate unbiased, as in RLOO. For ``objective.advantage.function``.
  """

  def __call__(self, inputs: AdvantageInputs) -> Float[Array, "batch time"]:
    centre = others_median(inputs.rewards, inputs.valid, inputs.groups)
    advantages = jnp.where(inputs.valid, inputs.rewards - centre, 0)
    return broadcast_to_tokens(advantages, inputs.segment_ids)


def others_median(
  rewards: Float[Array, "sequences"],
  valid: Bool[Array, "sequences"],
  groups: Int[Array, "sequences"],
) -> Float[Array, "sequences"]:
  """The median over the other valid members of each group; the own reward where there are none."""
  number = rewards.shape[0]
  groups = jnp.where(valid, groups, number)
  order = jnp.lexsort((rewards, groups))
  values, owners = rewards[order], groups[order]
  size = jax.ops.segment_sum(jnp.ones_like(groups), groups, number + 1)
  first = (jnp.cumsum(size) - size)[owners]
  rank, others = jnp.arange(number) - first, size[owners] - 1

  def nth(place: Array) -> Array:  # of the others, in rising order
    return values[jnp.minimum(first + place + (place >= rank), number - 1)]

  middle = (nth((others - 1) // 2) + nth(others // 2)) / 2
  found = jnp.where(others > 0, middle, values)
  return jnp.zeros_like(rewards).at[order].set(found)
