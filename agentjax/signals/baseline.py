"""The reward of a group's greedy episode, which its members are compared with (ReMax)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax.objectives.columns import BASELINES
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.trajectory.record import Reward, Trajectory


class GreedyBaseline(Signal):
  """Each episode carries the reward of the greedy episode of its group.

  Without one, or with one that has no reward, there is nothing to learn from the group.
  """

  name = "greedy_baseline"
  adds = (BASELINES,)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    greedy = {(*t.address[:2], t.group): t.reward.value for t in context.beside}
    return [_with_baseline(t, greedy.get((*t.address[:2], t.group))) for t in episodes], {}


def _with_baseline(trajectory: Trajectory, value: float | None) -> Trajectory:
  columns = {
    **trajectory.columns,
    BASELINES.name: np.array(0.0 if value is None else value, np.float32),
  }
  if value is not None:
    return dataclasses.replace(trajectory, columns=columns)
  invalid = Reward.invalid("the greedy episode of its group has no reward")
  return dataclasses.replace(trajectory, reward=invalid, columns=columns)
