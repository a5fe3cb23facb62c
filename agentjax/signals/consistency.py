"""Self-consistency of a group: how many of its answers agree (``objective.ambiguity``)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from agentjax.objectives.columns import CONSISTENCY
from agentjax.rewards.answers import normalise_number
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.trajectory.record import Trajectory


class Consistency(Signal):
  """Each episode carries the share of its group's episodes that gave its most frequent answer.

  Numbers are compared by value, other answers as text. Broken episodes do not count; one without an
  answer agrees with none.
  """

  name = "consistency"
  adds = (CONSISTENCY,)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    answers: dict[tuple[int, int], list[Hashable]] = collections.defaultdict(list)
    for trajectory in episodes:
      if not trajectory.status.broken:
        answers[trajectory.address[:2]].append(_comparable(trajectory.answer))
    shares = {}
    for group, given in answers.items():
      counts = collections.Counter(answer for answer in given if answer is not None)
      shares[group] = max(counts.values(), default=0) / len(given)
    return [
      dataclasses.replace(
        t,
        columns={
          **t.columns,
          CONSISTENCY.name: np.array(shares.get(t.address[:2], 0.0), np.float32),
        },
      )
      for t in episodes
    ], {}


def _comparable(answer: str | None) -> Hashable:
  if answer is None:
    return None
  number = normalise_number(answer)
  return answer.strip() if number is None else number
