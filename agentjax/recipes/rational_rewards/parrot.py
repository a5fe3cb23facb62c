"""PARROT in text: rationales of preferences, by a teacher that knows which answer is better.

1. *Anchored rationales.* For each of the two answers the teacher writes a critique, in the form
   that ``scorer`` asks a judge for. It is told which answer people prefer, and not to say so.
2. *Consistency.* A model that is not told sees question, answers and critiques, without their
   grades, and says which answer is better. A pair is kept if it finds the label in both orders and
   the better answer has the larger sum of grades. (72 % of the pairs are kept in the paper.)
3. *Student.* The critiques of kept pairs are conversations for supervised learning. Their questions
   are those of the part of the reward that the student then is, one answer at a time, so it never
   sees a label, nor the other answer.

The paper's rationales are about pairs of pictures, and one rationale is about both. One critique an
answer, both orders, the grades and all words of the prompts are ours.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentjax.config import Config, PositiveInt, check
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.recipes.rational_rewards.critiques import (
  Rationale,
  consistent,
  critique_request,
  name_pattern,
  preference_sum,
  read_critique,
)
from agentjax.recipes.rational_rewards.scorer import DEFAULT_ASPECTS, critique_messages
from agentjax.rewards.judges import (
  Judge,
  ask,
  ask_about,
  delimit,
  material_notice,
  nonce,
  question_key,
  question_text,
)
from agentjax.trajectory.record import Message

Side = Literal["chosen", "rejected"]
_SIDES: tuple[Side, Side] = ("chosen", "rejected")
_TOLD = re.compile(r"\bprefer|\bother answer|\bchosen\b|\brejected\b", re.IGNORECASE)
_VERDICT = re.compile(r"<answer>\s*([AB])\s*</answer>")
_TURN = "\n\nAssistant:"


@dataclasses.dataclass(frozen=True)
class Preference:
  """Two answers to one question.

  Attributes:
    id: addresses randomness.
    question: a conversation.
    chosen, rejected: the better answer and the other.
  """

  id: int
  question: tuple[Message, ...]
  chosen: str
  rejected: str

  def answer(self, side: Side) -> str:
    """The answer of a side."""
    return self.chosen if side == "chosen" else self.rejected


@dataclasses.dataclass(unsafe_hash=True)
class ParrotConfig(Config):
  """Settings of the flow.

  Attributes:
    aspects: what is graded; those of the part of the reward.
    attempts: replies that the teacher is asked for until one can be read and does not speak of the
      label.
    seed: of all randomness, with the pair.
  """

  aspects: tuple[str, ...] = DEFAULT_ASPECTS
  attempts: PositiveInt = 3
  seed: int = 0

  def validate(self, path: str = "parrot") -> None:
    super().validate(path)
    check(bool(self.aspects), f"{path}.aspects", self.aspects, "at least one aspect")


def read_preferences(path: str | os.PathLike[str]) -> list[Preference]:
  """Preferences of a JSONL file (``.gz`` too), numbered by their lines from 0.

  A row has the texts ``prompt``, ``chosen`` and ``rejected``; other fields do not matter. A row
  without ``prompt`` is one of HH-RLHF: both texts are dialogues of "Human:" and "Assistant:" that
  differ in their last answer. Rows whose answers are equal are left out.

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with line and field.
  """
  found = []
  for line, row in read_jsonl(path):
    # Half a surrogate pair is no character: a file cannot hold it.
    texts = {
      name: require_text(row, name, path, line).encode("utf-8", "replace").decode()
      for name in (*_SIDES, *(("prompt",) if "prompt" in row else ()))
    }
    chosen, rejected = (texts[side] for side in _SIDES)
    if "prompt" in texts:
      question: tuple[Message, ...] = (Message("user", texts["prompt"]),)
    else:
      question, chosen, rejected = _split_dialogues(chosen, rejected, path, line)
    if chosen != rejected:
      found.append(Preference(line - 1, question, chosen, rejected))
  if not found:
    raise DataError("no row has two different answers", path)
  return found


def _split_dialogues(
  chosen: str, rejected: str, path: str | os.PathLike[str], line: int
) -> tuple[tuple[Message, ...], str, str]:
  """The common beginning of two dialogues as messages, and both last answers."""
  common = os.path.commonprefix([chosen, rejected])
  begun, found, _ = common.rpartition(_TURN)
  if not found or not begun.startswith("\n\nHuman:"):
    raise DataError(
      "the row has no 'prompt', and 'chosen' and 'rejected' are no dialogues that begin with "
      "'\\n\\nHuman:' and have the same turns up to an answer",
      path,
      line,
    )
  turns = re.split(r"\n\n(Human|Assistant):", begun)[1:]
  messages = tuple(
    Message("user" if role == "Human" else "assistant", text.strip())
    for role, text in zip(turns[::2], turns[1::2], strict=True)
  )
  start = len(begun) + len(_TURN)
  return messages, chosen[start:].strip(), rejected[start:].strip()


# ---------------------------------------------------------------------------------- the two prompts


def anchored_messages(
  preference: Preference, side: Side, aspects: Sequence[str], *, key: int
) -> tuple[Message, ...]:
  """Asks the teacher for a critique of one answer, and tells it which answer is better."""
  other: Side = "rejected" if side == "chosen" else "chosen"
  shown = (
    ("question", question_text(preference.question)),
    ("answer", preference.answer(side)),
    ("other_answer", preference.answer(other)),
  )
  mark = nonce(key, *(text for _, text in shown))
  told = "the answer" if side == "chosen" else "the other answer"
  asked = (
    f"People who compared both answers prefer {told}. Find out why. Then write a critique of the "
    "answer alone that would lead a reader to the same preference. The critique must not mention "
    "the other answer, or that anybody prefers one.\n\n" + critique_request(aspects)
  )
  material = "\n\n".join(delimit(name, text, mark) for name, text in shown)
  return (
    Message("system", "You judge answers strictly and fairly. " + material_notice(mark)),
    ask_about(preference.question, f"{material}\n\n{asked}"),
  )


def check_messages(comparison: str, critiques: str, *, key: int) -> tuple[Message, ...]:
  """Asks which answer is better by the critiques, and does not tell.

  Args:
    comparison: question, answer A and answer B, as JSON.
    critiques: of both answers, in this order, as JSON.
    key: of the question.
  """
  mark = nonce(key, comparison, critiques)
  return (
    Message("system", "You compare answers by their critiques. " + material_notice(mark)),
    Message(
      "user",
      f"{delimit('comparison', comparison, mark)}\n\n{delimit('critiques', critiques, mark)}\n\n"
      "Which answer is better, if the critiques are right? End with <answer>A</answer> or "
      "<answer>B</answer>.",
    ),
  )


def _rationale(preference: Preference, critiques: Mapping[str, str], label: str) -> Rationale:
  """Both critiques as one rationale, with the better answer at the letter ``label``."""
  order = _SIDES if label == "A" else _SIDES[::-1]
  comparison = {"question": question_text(preference.question)}
  comparison |= {f"answer_{x}": preference.answer(s) for x, s in zip("AB", order, strict=True)}
  text = {f"critique_of_{x}": critiques[s] for x, s in zip("AB", order, strict=True)}
  return Rationale(
    json.dumps(comparison, ensure_ascii=False), json.dumps(text, ensure_ascii=False), label
  )


def without_grades(critique: str, aspects: Sequence[str]) -> str:
  """A critique in which "…" stands for the grades, so that its words alone speak.

  A grade is hidden wherever it stands in a line, also where ``read_critique`` does not take it.
  """
  grade = r"(?:N\s*/\s*A|[+-]?\d+(?:\.\d+)?)(?:\s*/\s*4)?"
  for aspect in aspects:
    pattern = rf"({name_pattern(aspect)}){grade}"
    critique = re.sub(pattern, r"\1…", critique, flags=re.IGNORECASE)
  return critique


# ----------------------------------------------------------------------------------------- the flow


class UnusableError(Exception):
  """The teacher wrote no critique that can be used; ``args`` say why."""


async def write_critiques(
  preference: Preference, teacher: Judge, config: ParrotConfig
) -> dict[str, str]:
  """The teacher's critiques of both answers.

  Raises:
    UnusableError: none of ``attempts`` replies has a grade and keeps the label to itself.
  """
  found: dict[str, str] = {}
  for side in _SIDES:
    reasons = []
    for attempt in range(config.attempts):
      key = question_key(config.seed, preference.id, side, attempt)
      asked = anchored_messages(preference, side, config.aspects, key=key)
      reply = (await ask(teacher, asked, key=key)).strip()
      graded = any(read_critique(reply, config.aspects).grades.values())
      if graded and not _TOLD.search(reply):
        found[side] = reply
        break
      reasons.append("it speaks of the label" if graded else "it has no grade")
    else:
      raise UnusableError(f"critique of the {side} answer: {', '.join(reasons)}")
  return found


@dataclasses.dataclass(frozen=True)
class Checked:
  """What the consistency filter found.

  Attributes:
    by_words: whether the label was predicted from the critiques in both orders.
    by_grades: whether the better answer has the larger sum of grades.
  """

  by_words: bool
  by_grades: bool

  @property
  def kept(self) -> bool:
    return self.by_words and self.by_grades


async def check_critiques(
  preference: Preference, critiques: Mapping[str, str], judge: Judge, config: ParrotConfig
) -> Checked:
  """Whether the label follows from the critiques, for a judge that is not told."""

  async def predict(comparison: str, text: str) -> str | None:
    key = question_key(config.seed, preference.id, "check", comparison)
    reply = await ask(judge, check_messages(comparison, text, key=key), key=key)
    verdicts = _VERDICT.findall(reply)
    return verdicts[-1] if verdicts else None

  orders = [_rationale(preference, critiques, label) for label in ("A", "B")]
  kept, _ = await consistent(orders, predict, lambda text: without_grades(text, config.aspects))
  sums = [
    preference_sum(read_critique(critiques[side], config.aspects), config.aspects)
    for side in _SIDES
  ]
  return Checked(len(kept) == len(orders), sums[0] > sums[1])


def student_rows(
  preference: Preference, critiques: Mapping[str, str], config: ParrotConfig
) -> Iterator[tuple[Message, ...]]:
  """A conversation an answer: the question of the part of the reward, and the critique."""
  for side in _SIDES:
    key = question_key(config.seed, preference.id, "student", side)
    asked = critique_messages(preference.question, preference.answer(side), config.aspects, key=key)
    yield (*asked, Message("assistant", critiques[side]))


async def prefers_chosen(preference: Preference, judge: Judge, config: ParrotConfig) -> float:
  """1 if a judge of single answers, such as the student, grades the better one higher; .5 if equal.

  An aspect without a grade counts 2.5.
  """
  sums: list[Any] = []
  for side in _SIDES:
    key = question_key(config.seed, preference.id, "compare", side)
    answer = preference.answer(side)
    asked = critique_messages(preference.question, answer, config.aspects, key=key)
    reply = await ask(judge, asked, key=key)
    sums.append(preference_sum(read_critique(reply, config.aspects), config.aspects))
  return (1 + (sums[0] > sums[1]) - (sums[0] < sums[1])) / 2
