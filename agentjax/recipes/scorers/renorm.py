"""ReNorm of principle process rewards (PPR): turns are paid by their score and by the outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.rewards.graph import GroupScorer, TurnScores
from agentjax.rewards.scorer_config import GroupScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class RenormConfig(GroupScorerConfig):
  """``r_t = r_process,t + r_outcome - 1`` of every judged turn; both scores lie in 0..1.

  A good turn of a successful episode earns 1, a good turn of a failed one 0, a bad turn of a failed
  one -1. So good-looking turns of failures are not reinforced. The last turn that the policy drew,
  mostly the answer, has the outcome in the place of its score where it was not judged: it earns
  ``2 r_outcome - 1``, 1 or -1 (ours). Else neither the answer nor an episode without any judged
  turn would learn from the outcome. Other turns that were not judged earn nothing.

  Where episodes differ in their number of turns this pays, or costs, every turn of it: long
  successes earn more. Give this part weight 1 and the other two weight 0, and name it in
  ``objective.advantage.turn_rewards``.

  Attributes:
    process: part of the reward that is earned turn by turn (``Trajectory.turn_rewards``).
    outcome: part of the reward of the whole episode.
  """

  process: str = "process"
  outcome: str = "exact_match"

  @property
  def needs(self) -> tuple[str, ...]:
    return (self.process, self.outcome)

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    """See ``ScorerConfig.build``."""

    def score(members: Sequence[Trajectory], task: Task) -> list[Reward | TurnScores]:
      return [self._of(member) for member in members]

    return score

  def _of(self, episode: Trajectory) -> Reward | TurnScores:
    outcome, judged = episode.reward_parts[self.outcome].value, episode.turn_rewards
    if outcome is None or self.process not in judged:
      return Reward.invalid(f"no value of {self.outcome}, or no turn of {self.process}")
    scores = list(judged[self.process])
    drawn = [i for i, segment in enumerate(episode.segments) if segment.sampled.any()]
    if drawn and scores[drawn[-1]] is None:
      scores[drawn[-1]] = outcome
    return TurnScores([None if v is None else v + outcome - 1 for v in scores])
