"""The reward of a group's greedy episode, the baseline of its members (ReMax)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax.objectives.columns import BASELINES
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.trajectory.record import Reward, Trajectory


class GreedyBaseline(Signal):
  """Each episode carries the reward of the greedy episode of its group.

  If the greedy episode is missing or has no reward, the group is not trained on.
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
