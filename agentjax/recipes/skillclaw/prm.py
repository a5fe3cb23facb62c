"""A part of the reward for replays of tasks that no world judges: votes of a process reward model.

The source's client grades replies so: 3 votes at temperature .6, each "Score: 1", "0" or "-1"; the
majority counts, and without one it is 0. The reward is (vote + 1) / 2.
"""

from __future__ import annotations

import collections
import dataclasses
import re

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.config import PositiveInt
from agentjax.rewards.graph import Scorer
from agentjax.rewards.judges import (
  Judge,
  JudgeUnavailableError,
  ask,
  delimit,
  final_answer,
  material_notice,
  nonce,
  question_key,
  question_text,
)
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Message, Reward, Task, Trajectory

_VOTE = re.compile(r"score[*_`\s]*[:=][*_`\s]*([+\u2212-]?\s*[01])(?![.,]?\w)", re.I)
_ASKED = (
  "Does the answer do what was asked for? Say why, and end with a line 'Score: 1' if it does, "
  "'Score: -1' if it does not, or 'Score: 0' if it cannot be told."
)


@dataclasses.dataclass(unsafe_hash=True)
class PrmConfig(ScorerConfig):
  """How answers are voted on, and by whom.

  Attributes:
    votes: of each answer.
    judge: the endpoint of the judge.
    seed: of the judge's randomness, with the address of what it judges.
  """

  votes: PositiveInt = 3
  judge: HttpJudgeConfig = dataclasses.field(
    default_factory=lambda: HttpJudgeConfig(temperature=0.6)
  )
  seed: int = 0

  def build(self, sandboxes: Sandboxes) -> Scorer:
    return PrmScorer(HttpJudge(self.judge), self)


class PrmScorer:
  """Scores the final answer by votes; no answer scores 0.

  If the judge stays unavailable, or no vote can be read, the reward is invalid.

  Args:
    judge: votes.
    config: see PrmConfig; its ``judge`` is not used.
  """

  def __init__(self, judge: Judge, config: PrmConfig):
    self._judge, self._config = judge, config

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    answer = final_answer(trajectory, task)
    if answer is None:
      return Reward(0.0)
    question, votes = question_text(task.prompt), []
    for number in range(self._config.votes):
      key = question_key(self._config.seed, *trajectory.address, number)
      mark = nonce(key, question, answer)
      shown = f"{delimit('question', question, mark)}\n\n{delimit('answer', answer, mark)}"
      messages = (
        Message("system", "You grade answers strictly and fairly. " + material_notice(mark)),
        Message("user", f"{shown}\n\n{_ASKED}"),
      )
      try:
        reply = await ask(self._judge, messages, key=key)
      except JudgeUnavailableError as error:
        return Reward.invalid(f"judge unavailable: {error}")
      votes.append(read_vote(reply))
    known = [vote for vote in votes if vote is not None]
    if not known:
      return Reward.invalid("no vote could be read")
    return Reward((majority(known) + 1) / 2)


def read_vote(reply: str) -> int | None:
  """The last vote of a reply; None without one."""
  found = _VOTE.findall(reply)
  return int("".join(found[-1].split()).replace("\u2212", "-")) if found else None


def majority(votes: list[int]) -> int:
  """The most frequent vote; 0 where two are as frequent."""
  (first, count), *rest = collections.Counter(votes).most_common()
  return 0 if rest and rest[0][1] == count else first
