"""Self-consistency of a group: its majority is the label, and its size says what a task is worth.

A run without answers pays the part ``MajorityConfig`` and keeps tasks by
``rl.selection.score=agentjax.recipes.agent0:consistency`` in the band .3 to .8.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

from agentjax.rewards.answers import normalise_number
from agentjax.rewards.graph import GroupScorer
from agentjax.rewards.scorer_config import GroupScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Status, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class MajorityConfig(GroupScorerConfig):
  """1 where the answer is the most frequent one of the group, else 0; the task's is not read.

  Numbers are compared by value. Among equally frequent answers the first episode's counts. Policy
  errors, broken episodes and those without an answer have no vote.
  """

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    """See ``ScorerConfig.build``."""

    def score(members: Sequence[Trajectory], task: Task) -> list[float]:
      del task
      votes = [vote_of(member) for member in members]
      counts = collections.Counter(vote for vote in votes if vote is not None)
      label = max(counts, key=lambda vote: counts[vote], default=None)
      return [float(vote is not None and vote == label) for vote in votes]

    return score


def consistency(members: Sequence[Trajectory]) -> float:
  """Share of the group that gave its most frequent answer, for ``rl.selection.score``."""
  votes = [vote_of(member) for member in members if not member.status.broken]
  counts = collections.Counter(vote for vote in votes if vote is not None)
  return max(counts.values(), default=0) / max(len(votes), 1)


def vote_of(episode: Trajectory) -> Hashable:
  """What an episode answered, so that equal answers are equal; None without a vote."""
  wrong = episode.status.broken or episode.status is Status.POLICY_ERROR
  if episode.answer is None or wrong:
    return None
  number = normalise_number(episode.answer)
  return episode.answer.strip() if number is None else number
