"""Self-consistency of a group: how far its answers agree (``objective.ambiguity``)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

from agentjax.rewards.answers import normalise_number
from agentjax.trajectory.record import Reward, Trajectory

CONSISTENCY_PART = "self_consistency"  # of its group, among a member's parts


def with_consistency(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
  """Copies that carry the share of their group's episodes that gave its most frequent answer.

  Numbers are compared by value, other answers as text. Broken episodes do not count; one without an
  answer agrees with none.
  """
  answers: dict[tuple[int, int], list[Hashable]] = collections.defaultdict(list)
  for trajectory in trajectories:
    if not trajectory.status.broken:
      answers[trajectory.address[:2]].append(_comparable(trajectory.answer))
  shares = {}
  for group, given in answers.items():
    counts = collections.Counter(answer for answer in given if answer is not None)
    shares[group] = max(counts.values(), default=0) / len(given)
  return [
    dataclasses.replace(
      t,
      reward_parts={**t.reward_parts, CONSISTENCY_PART: Reward(shares.get(t.address[:2], 0.0))},
    )
    for t in trajectories
  ]


def _comparable(answer: str | None) -> Hashable:
  if answer is None:
    return None
  number = normalise_number(answer)
  return answer.strip() if number is None else number
