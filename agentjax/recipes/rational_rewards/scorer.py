"""A part of the reward: one judge grades an answer aspect by aspect.

The paper's judge looks at pictures. This one reads text, so the aspects are settings, and the words
in which they are asked for are ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.config import check
from agentjax.recipes.rational_rewards.critiques import (
  critique_request,
  critique_reward,
  read_critique,
)
from agentjax.rewards.graph import Scorer
from agentjax.rewards.judges import (
  Judge,
  JudgeUnavailableError,
  LengthAlarm,
  ask,
  ask_about,
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

DEFAULT_ASPECTS = ("faithfulness", "correctness", "clarity")


@dataclasses.dataclass(unsafe_hash=True)
class RationalRewardsConfig(ScorerConfig):
  """How answers are graded, and by whom.

  Attributes:
    aspects: what is graded from 1 to 4, in lower case with underscores.
    unreadable: the reward for a critique without a grade; see ``critique_reward``.
    judge: the endpoint of the judge.
    seed: of the judge's randomness, with the address of what it judges.
  """

  aspects: tuple[str, ...] = DEFAULT_ASPECTS
  unreadable: Literal["invalid", "zero"] = "invalid"
  judge: HttpJudgeConfig = dataclasses.field(default_factory=HttpJudgeConfig)
  seed: int = 0

  def validate(self, path: str = "rational_rewards") -> None:
    super().validate(path)
    check(bool(self.aspects), f"{path}.aspects", self.aspects, "at least one aspect")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    return CritiqueScorer(HttpJudge(self.judge), self)


class CritiqueScorer:
  """Scores the final answer by a judge's critique; no answer scores 0.

  If the judge stays unavailable, the reward is invalid.

  Args:
    judge: writes the critiques.
    config: see RationalRewardsConfig; its ``judge`` is not used.
  """

  def __init__(self, judge: Judge, config: RationalRewardsConfig):
    self._judge, self._config = judge, config
    self._alarm = LengthAlarm("rational_rewards")

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    answer = final_answer(trajectory, task)
    if answer is None:
      return Reward(0.0)
    key = question_key(self._config.seed, *trajectory.address)
    messages = critique_messages(task.prompt, answer, self._config.aspects, key=key)
    try:
      reply = await ask(self._judge, messages, key=key)
    except JudgeUnavailableError as error:
      return Reward.invalid(f"judge unavailable: {error}")
    critique = read_critique(reply, self._config.aspects)
    reward = critique_reward(critique, unreadable=self._config.unreadable)
    if reward.value is not None:
      self._alarm.note(reward.value, len(answer), task.id)
    return reward


def critique_messages(
  question: Sequence[Message], answer: str, aspects: tuple[str, ...], *, key: int
) -> tuple[Message, ...]:
  """Asks for a critique of an answer."""
  shown = question_text(question)
  mark = nonce(key, shown, answer)
  material = f"{delimit('question', shown, mark)}\n\n{delimit('answer', answer, mark)}"
  return (
    Message("system", "You judge answers strictly and fairly. " + material_notice(mark)),
    ask_about(
      question,
      f"{material}\n\n{critique_request(aspects)}",
    ),
  )
