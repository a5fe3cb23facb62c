r"""iStar's advantages: of the outcome, and of every step by itself.

    A(turn k of episode i) = A_E(i) + weight (r_k - mean r) / (std r + epsilon)

``A_E`` compares outcomes within the group, mean and deviation of the steps are over all turns of
the group. The reward r of a turn is ``beta log (pi_phi / pi_old)`` of its tokens, which
``config.rl.process`` pays (``recipes.prime``) with ``per="turn"``, ``against="policy"`` and
``online.loss="pairs"``. Rewards of later turns do not count for earlier ones, as they would with
credit "reward_to_go".
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.config import NonNegativeFloat, PositiveFloat, check
from agentjax.objectives.advantage_function import AdvantageChoice, AdvantageInputs
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.segments import (
  broadcast_to_tokens,
  last_of_unit,
  turn_units,
  unit_sum,
)
from agentjax.schedules import Scheduled
from agentjax.training.experiment import Experiment


@dataclasses.dataclass(unsafe_hash=True)
class IStarAdvantages(AdvantageChoice):
  """See the module; for ``objective.advantage.function``.

  Attributes:
    centre, scale: of the outcome. iStar's code has the group's mean and deviation, and
      leave-one-out without a scale.
    weight: alpha; 1 in iStar.
    epsilon: added to deviations. Ours.
  """

  centre: Literal["group_mean", "leave_one_out"] = "group_mean"
  scale: Literal["group_std", "none"] = "group_std"
  weight: Scheduled[PositiveFloat] = 1.0
  epsilon: NonNegativeFloat = 1e-6

  def check_run(self, experiment: Experiment, objective: ObjectiveConfig, path: str) -> None:
    """Something must pay the turns."""
    process = experiment.rl.process
    said = f"'prime' with per='turn', which pays turns, with {path}.advantage.function"
    paid = process is not None and getattr(process, "per", None) == "turn"
    check(paid, "config.rl.process", process and process.chosen, said)

  def __call__(self, inputs: AdvantageInputs) -> Float[Array, "batch time"]:
    settings = AdvantageConfig(centre=self.centre, scale=self.scale, epsilon=self.epsilon)
    outcome = sequence_advantages(inputs.rewards, inputs.valid, inputs.groups, settings)
    paid = inputs.token_rewards
    assert paid is not None
    units = turn_units(inputs.segment_ids, inputs.turns)
    steps = group_standard(paid, last_of_unit(inputs.weights, units), inputs, self.epsilon)
    return broadcast_to_tokens(outcome, inputs.segment_ids) + self.weight * unit_sum(steps, units)


def group_standard(
  values: Array, chosen: Array, inputs: AdvantageInputs, epsilon: float
) -> Float[Array, "batch time"]:
  """Chosen tokens' values in standard deviations of those of their group; 0 elsewhere."""
  number = inputs.rewards.shape[0]
  sequence = jnp.maximum(inputs.segment_ids - 1, 0)
  chosen = chosen & inputs.valid[sequence]
  groups = jnp.where(chosen, inputs.groups[sequence], number)

  def total(array: Array) -> Array:
    return jax.ops.segment_sum(jnp.where(chosen, array, 0).ravel(), groups.ravel(), number + 1)

  count = jnp.maximum(total(jnp.ones_like(values)), 1)
  centred = values - (total(values) / count)[groups]
  deviation = jnp.sqrt(total(jnp.square(centred)) / count)[groups]
  return jnp.where(chosen, centred / (deviation + epsilon), 0)
