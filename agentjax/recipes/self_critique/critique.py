"""A critique: an episode in which the policy compares two answers by rubrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from agentjax.config import Config
from agentjax.rewards.judges import (
  ask_about,
  delimit,
  material_notice,
  nonce,
  question_text,
)
from agentjax.text.answers import read_marked_answer
from agentjax.trajectory.record import Message, Reward, Task
from agentjax.world.environment import Action, Environment, Observation, Step

CRITIC = "critic"  # the agent that compares
RUBRIC = "rubric"  # in the metadata of a task: criteria that people wrote for it, a list of texts

Verdict = Literal["first", "second", "tie"]
_MARKS: dict[str, Verdict] = {"1": "first", "2": "second", "0": "tie"}


@dataclasses.dataclass(unsafe_hash=True)
class Rubrics(Config):
  """By what answers are compared; all words are ours, the paper's are not known to us.

  The third kind, criteria that people annotated, is of a task: its ``metadata["rubric"]``, a list
  of texts, or of mappings with a ``text``.

  Attributes:
    core: values that hold for all answers.
    prescriptive: rules against answers that only please a judge.
  """

  core: tuple[str, ...] = (
    "It answers what was asked, clearly and without anything that does not matter.",
    "It is correct, and says what is not certain.",
  )
  prescriptive: tuple[str, ...] = (
    "It does not begin with praise of the question or of the one who asked.",
    "It does not say of itself that it is good, correct or complete.",
  )

  def text(self, task: Task) -> str:
    """All criteria for a task, by kind; a kind without any is left out."""
    own = task.metadata.get(RUBRIC, ())
    human = [item["text"] if isinstance(item, dict) else str(item) for item in own]
    kinds = (("Core", self.core), ("Rules", self.prescriptive), ("For this question", human))
    return "\n".join(
      f"{name}:\n" + "\n".join(f"- {item}" for item in items) for name, items in kinds if items
    )


def critique_messages(
  task: Task, first: str, second: str, rubrics: Rubrics, *, key: int
) -> tuple[Message, ...]:
  """What the critic reads: the question, two answers between marks, the rubrics, how to reply."""
  shown = question_text(task.prompt)
  mark = nonce(key, shown, first, second)
  named = (("question", shown), ("answer_1", first), ("answer_2", second))
  material = "\n".join(delimit(name, text, mark) for name, text in named)
  criteria = rubrics.text(task)
  by = f" by these criteria.\n{criteria}\n" if criteria else ". "
  asked = (
    f"{material_notice(mark)}\n{material}\nCompare the two answers{by}"
    "End with a line that holds only #### and 1 if answer_1 is better, 2 if answer_2 is better, or "
    "0 if neither is."
  )
  return (ask_about(task.prompt, asked),)


def read_verdict(text: str) -> Verdict | None:
  """The verdict of a critique, or None where it cannot be read."""
  return _MARKS.get((read_marked_answer(text) or "").strip())


def agreement(verdict: Verdict | None, better: Verdict) -> float:
  """What a critique of a pair is paid whose better answer is known.

  1 if it agrees with the verifier, 1/2 for a tie, as much as a guess earns, else 0, also where it
  cannot be read. Ours.
  """
  return 0.5 if verdict == "tie" else float(verdict == better)


class CritiqueEnvironment(Environment):
  """One turn of the critic.

  Args:
    messages: what it reads.
    better: the answer that the verifier prefers; None where there is no verifier, and then nothing
      is paid.
  """

  agents = (CRITIC,)

  def __init__(self, messages: Sequence[Message], better: Verdict | None):
    self._messages, self._better = tuple(messages), better

  async def reset(self, task: Task, key: int) -> Observation:
    del task, key
    return Observation(self._messages, next=CRITIC)

  async def step(self, action: Action) -> Step:
    verdict = None if action.truncated else read_verdict(action.text)
    paid = None if self._better is None else Reward(agreement(verdict, self._better))
    return Step(Observation((), next=CRITIC), reward=paid, terminated=True, answer=verdict)
