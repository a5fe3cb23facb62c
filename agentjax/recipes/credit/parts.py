"""GDPO: parts of the reward that are standardised one by one, so that none drowns the others."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Array, Float

from agentjax.config import NonNegativeFloat, check
from agentjax.objectives.advantage_function import AdvantageChoice, AdvantageInputs
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.signals.reward_parts import counted_part, need_parts
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.record import Trajectory

PART_ADVANTAGE = register_column(
  Column(
    "part_advantage",
    "float32",
    "Weighted sum of the parts of the reward, each in standard deviations of its group.",
    level="sequence",
    in_loss=False,
  )
)


@dataclasses.dataclass(unsafe_hash=True)
class PartsAdvantage(AdvantageChoice):
  """``A = sum_k weight_k (part_k - mean) / (std + epsilon)``, over the members of the group.

  With ``advantage.whiten`` the sum is standardised over the batch, as in verl and NeMo-RL (preset
  "gdpo"). A part that is equal for all members adds nothing.

  Attributes:
    parts: of the reward; () takes all that have a weight in ``config.reward``, with that weight.
    weights: one a part; () gives all the same.
    epsilon: added to the deviation (of the sample).
  """

  parts: tuple[str, ...] = ()
  weights: tuple[float, ...] = ()
  epsilon: NonNegativeFloat = 1e-6

  def validate(self, path: str = "config.rl.objective.advantage.function") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(len(set(self.parts)) == len(self.parts), "parts", "distinct names")
    said = f"one number for each of {path}.parts, or ()"
    require(len(self.weights) in (0, len(self.parts)), "weights", said)

  def check_run(self, experiment: Experiment, objective: ObjectiveConfig, path: str) -> None:
    """Parts are compared within a group; one part alone is what plain GRPO does."""
    require = experiment.requirements("config")
    shares, size = self.shares(experiment), experiment.rollout.group_size
    require(set(shares) <= set(experiment.reward.parts), "reward.parts", f"{set(shares)} in it")
    require(
      len(shares) > 1,
      "reward.parts",
      f"two parts with a weight, or more, with {path}.advantage.function='parts', as in "
      "preset('gdpo'), or its setting 'parts'",
    )
    check(size > 1, "config.rollout.group_size", size, f">= 2 with {path}.advantage.function")

  def shares(self, experiment: Experiment) -> dict[str, float]:
    """The weight of each part."""
    if not self.parts:
      return {name: weight for name, weight in experiment.reward.shares.items() if weight}
    return dict(zip(self.parts, self.weights or (1.0,) * len(self.parts), strict=True))

  def signals(self, experiment: Experiment) -> Sequence[Signal]:
    return (PartAdvantages(self.shares(experiment), self.epsilon),)

  def __call__(self, inputs: AdvantageInputs) -> Float[Array, "batch time"]:
    return inputs.column(PART_ADVANTAGE.name)


class PartAdvantages(Signal):
  """See PartsAdvantage. An episode that lacks a part has no valid reward.

  One that ended by a breach of the policy has each part, and none of them above 0.

  Args:
    shares: weight of each part.
    epsilon: see PartsAdvantage.
  """

  name = "part_advantages"
  adds = (PART_ADVANTAGE,)

  def __init__(self, shares: Mapping[str, float], epsilon: float):
    self._shares, self._epsilon = dict(shares), epsilon

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    known = need_parts(episodes, tuple(self._shares))
    groups: dict[tuple[int, str, str], list[int]] = collections.defaultdict(list)
    for i, one in enumerate(known):
      if one.usable:
        groups[one.advantage_group].append(i)
    advantages = np.zeros(len(known))
    for members in groups.values():
      values = [[counted_part(known[i], name) or 0.0 for name in self._shares] for i in members]
      advantages[members] = self._advantages(np.array(values, np.float64))
    return [
      dataclasses.replace(
        one, columns={**one.columns, PART_ADVANTAGE.name: np.array(a, np.float32)}
      )
      for one, a in zip(known, advantages, strict=True)
    ], {}

  def _advantages(self, values: np.ndarray) -> np.ndarray:
    """[members], from parts [members, parts]."""
    spread = values.max(0) > values.min(0)  # exactly: a rounded mean of equal values may differ
    deviation = values.std(0, ddof=1) if len(values) > 1 else np.ones(values.shape[1])
    standard = np.where(spread, (values - values.mean(0)) / (deviation + self._epsilon), 0)
    return standard @ np.array(list(self._shares.values()))
