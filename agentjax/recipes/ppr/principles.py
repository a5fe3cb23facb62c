"""A part of the reward that is earned turn by turn: how well a step follows principles.

A step is a turn with calls of tools: the judge reads the question, the earlier steps, and the calls
of this one with their results. It names a score and the largest one that the principles allow; the
part is their quotient. A turn without calls is not judged; ReNorm pays it by the outcome where it
is the last one (``scorers.RenormConfig``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.config import PositiveInt, check
from agentjax.rewards.graph import Scorer, TurnScores
from agentjax.rewards.judges import (
  Judge,
  JudgeUnavailableError,
  ask,
  ask_about,
  delimit,
  last_json_object,
  material_notice,
  nonce,
  number_in,
  question_key,
  question_text,
)
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Message, Reward, Task, ToolRecord, Trajectory

_MOST = 100.0  # no score of a judge is larger


@dataclasses.dataclass(unsafe_hash=True)
class PrinciplesConfig(ScorerConfig):
  """How steps are judged, and by whom.

  Attributes:
    principles: what a good step does, a sentence each. Ours.
    judge: an endpoint; None asks nobody, and a step is worth the share of its calls that succeeded.
    shown_characters: of each result, from its head.
    seed: of the judge's randomness, with the address of what it judges.
  """

  principles: tuple[str, ...] = (
    "The step is needed for the answer and repeats no earlier one.",
    "Its calls are well formed and ask for what the step needs.",
    "It builds on what earlier results say.",
  )
  judge: HttpJudgeConfig | None = None
  shown_characters: PositiveInt = 2000
  seed: int = 0

  def validate(self, path: str = "principles") -> None:
    super().validate(path)
    check(bool(self.principles), f"{path}.principles", self.principles, "at least one sentence")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""
    return Principles(None if self.judge is None else HttpJudge(self.judge), self)


class Principles:
  """Scores the turns of an episode. If the judge stays unavailable, the reward is invalid.

  Args:
    judge: writes verdicts; None for none.
    config: see PrinciplesConfig; its ``judge`` is not used.
  """

  def __init__(self, judge: Judge | None, config: PrinciplesConfig):
    self._judge, self._config = judge, config

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward | TurnScores:
    drawn = [s.turn for s in trajectory.segments if s.sampled.any()]
    steps = [[r for r in trajectory.tools if r.turn == turn] for turn in drawn]
    try:
      scores = await asyncio.gather(
        *(self._score(trajectory, task, steps, i) for i in range(len(steps)))
      )
    except JudgeUnavailableError as error:
      return Reward.invalid(f"judge unavailable: {error}")
    return TurnScores.of_turns(trajectory, scores)

  async def _score(
    self, trajectory: Trajectory, task: Task, steps: Sequence[Sequence[ToolRecord]], index: int
  ) -> float | None:
    calls = steps[index]
    if not calls:
      return None
    if self._judge is None:
      return sum(call.status == "ok" for call in calls) / len(calls)
    key = question_key(self._config.seed, *trajectory.address, index)
    messages = step_messages(task.prompt, steps[: index + 1], self._config, key=key)
    return read_score(await ask(self._judge, messages, key=key))


def read_score(reply: str) -> float | None:
  """``score / max`` of the last JSON object of a reply, 0..1; None if there is none."""
  said = last_json_object(reply) or {}
  most = number_in(said.get("max"), 0, _MOST)
  score = number_in(said.get("score"), 0, most) if most else None
  return None if score is None or not most else score / most


def step_messages(
  question: Sequence[Message],
  steps: Sequence[Sequence[ToolRecord]],
  config: PrinciplesConfig,
  *,
  key: int,
) -> tuple[Message, ...]:
  """Asks for a verdict on the last of the steps."""
  shown = question_text(question)
  texts = ["\n".join(_call_text(call, config.shown_characters) for call in s) for s in steps if s]
  mark = nonce(key, shown, *texts)
  earlier = "\n".join(texts[:-1]) or "none"
  rules = "\n".join(f"{i}. {rule}" for i, rule in enumerate(config.principles, start=1))
  asked = (
    f"Judge the step by these principles:\n{rules}\n\nGive up to 10 points for each that applies. "
    'Close with {"score": the points, "max": the most that were possible}.'
  )
  return (
    Message("system", "You judge steps strictly and fairly. " + material_notice(mark)),
    ask_about(
      question,
      f"{delimit('question', shown, mark)}\n\n{delimit('earlier', earlier, mark)}\n\n"
      f"{delimit('step', texts[-1], mark)}\n\n{asked}",
    ),
  )


def _call_text(call: ToolRecord, most: int) -> str:
  arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
  return f"{call.name}({arguments})\n-> {call.status}: {call.output[:most]}"
