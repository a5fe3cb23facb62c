r"""C2 (2604.13618): rubrics that help a judge and rubrics that mislead it, made from preferences.

1. *Synthesis.* For a pair with a known label, K rubrics are sampled. A judge gives its verdict
   without a rubric and with each; the margin is ``m = log p(correct letter) - log p(other letter)``
   at the letter of the verdict. Helpful are ``H = {r: m_r > max(0, m_0)}``, misleading ``M = {r:
   m_r < min(0, m_0)}``. A pair is kept where both exist; ``r+ = argmax_H m_r`` and ``r- = argmin_M
   m_r``.
2. *Generator*: DPO, r+ chosen and r- rejected (``preset("dpo")``: beta .1).
3. *Verifier*: GRPO on three tasks a pair (no rubric, r+, r-) with the reward
   ``.6 preference + .3 rubric label + .1 format``, each +1 or -1, the rubric label 0 without one.
4. *Inference*: sample a rubric and judge with it; if the judge does not call it helpful, or its
   reply cannot be read, judge without (``prefer``). ``recipes.c2.reward`` is a part of the reward
   that does this.

A margin takes exact log-probs of both letters (``EngineJudge``). Some services give only the 20
most likely tokens. A letter that is not among them must not give an infinite margin, which would
win argmax or argmin: see ``HttpJudge.log_probs``.

Our choices, where the source gives none: the words of the prompts; and a judge that uses up its
tokens before its verdict is asked for the letter at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from agentjax.config import AtLeastTwo, Config, PositiveInt
from agentjax.rewards.judges import (
  Judge,
  LetterJudge,
  ask,
  ask_about,
  delimit,
  final_answer,
  material_notice,
  nonce,
  question_key,
  question_text,
  retry,
)
from agentjax.trajectory.record import Message, Task, Trajectory

Letter = Literal["A", "B"]
RubricLabel = Literal["helpful", "misleading"]

REWARD_PARTS = tuple(f"{__name__}:{name}" for name in ("c2_preference", "c2_rubric", "c2_format"))
REWARD_WEIGHTS = (0.6, 0.3, 0.1)  # of the parts, for a RewardConfig
CRITERIA = ("Helpfulness", "Completeness", "Safety", "Instruction-following")


@dataclasses.dataclass(frozen=True)
class Answers:
  """Two answers to one conversation.

  Attributes:
    id: addresses randomness.
    question: the conversation.
    first, second: answers A and B.
  """

  id: int
  question: tuple[Message, ...]
  first: str
  second: str


@dataclasses.dataclass(frozen=True)
class Pair(Answers):
  """Two answers, and which is better: ``label``."""

  label: Letter


def arrange(
  id: int, question: Sequence[Message], chosen: str, rejected: str, *, seed: int = 13
) -> Pair:
  """A pair in an order that seed and id decide; the source's seed is 13."""
  if question_key(seed, id) % 2:
    return Pair(id, tuple(question), chosen, rejected, "A")
  return Pair(id, tuple(question), rejected, chosen, "B")


# ---------------------------------------------------------------------------------------- margins


def margin(log_probs: Mapping[str, float], label: Letter) -> float:
  """``log p(label) - log p(other letter)``; above 0 where the judge is right."""
  return log_probs[label] - log_probs["B" if label == "A" else "A"]


class NotFiniteError(ValueError):
  """A judge's log-prob of a letter is not finite."""


@dataclasses.dataclass(frozen=True)
class Selection:
  """Places of the rubrics that help and mislead, and the best of each."""

  helpful: tuple[int, ...]
  misleading: tuple[int, ...]
  most_helpful: int
  most_misleading: int


def select(without: float, margins: Sequence[float]) -> Selection | None:
  """H, M, r+ and r- by their margins; None where H or M is empty.

  Args:
    without: m_0, the margin without a rubric.
    margins: m_r of each rubric; finite.

  Raises:
    NotFiniteError: a margin that is not finite.
  """
  if not all(abs(m) < float("inf") for m in (without, *margins)):
    raise NotFiniteError(f"margins must be finite, got {without} and {list(margins)}.")
  helpful = tuple(i for i, m in enumerate(margins) if m > max(0.0, without))
  misleading = tuple(i for i, m in enumerate(margins) if m < min(0.0, without))
  if not helpful or not misleading:
    return None
  return Selection(
    helpful,
    misleading,
    max(helpful, key=lambda i: margins[i]),
    min(misleading, key=lambda i: margins[i]),
  )


# ---------------------------------------------------------------------------- prompts and reading


def rubric_messages(pair: Answers, *, key: int) -> tuple[Message, ...]:
  """Asks for a rubric: what the generator is sampled and trained on."""
  return _messages(
    pair,
    None,
    "Write a rubric by which these two answers can be compared. Think first, between <analyze> and "
    "</analyze>. Then list numbered criteria, one a line, each of one of the kinds "
    f"{', '.join(CRITERIA)}, and each with a question that is answered by yes or no, as in\n"
    "1. Completeness: Does the answer name both causes?",
    key,
  )


def verdict_messages(pair: Answers, rubric: str | None, *, key: int) -> tuple[Message, ...]:
  """Asks for a verdict, with or without a rubric: what the verifier is sampled and trained on."""
  if rubric is None:
    asked = "Think between <analyze> and </analyze>, then write <answer>A</answer> or "
    asked += "<answer>B</answer>, whichever answer is better."
  else:
    asked = (
      "The rubric may help to compare the answers or mislead. Think between <analyze> and "
      "</analyze>, then write <rubric>helpful</rubric> or <rubric>misleading</rubric>, then "
      "<answer>A</answer> or <answer>B</answer>, whichever answer is better."
    )
  return _messages(pair, rubric, asked, key)


def _messages(pair: Answers, rubric: str | None, asked: str, key: int) -> tuple[Message, ...]:
  question = question_text(pair.question)
  texts = {"question": question, "answer_A": pair.first, "answer_B": pair.second}
  if rubric is not None:
    texts["rubric"] = rubric
  mark = nonce(key, *texts.values())
  shown = [delimit(name, text, mark) for name, text in texts.items()]
  return (
    Message("system", "You compare answers strictly and fairly. " + material_notice(mark)),
    ask_about(pair.question, "\n\n".join([*shown, asked])),
  )


_CRITERION = re.compile(
  rf"^[ \t]*\d+[.)][ \t]*\**(?:{'|'.join(CRITERIA)})\b.*\?[ \t]*$", re.IGNORECASE | re.MULTILINE
)


def read_rubric(text: str) -> str | None:
  """The rubric of a reply, unchanged; None without an analysis and a numbered criterion after
  it."""
  _, analysed, rest = text.partition("</analyze>")
  if not analysed or "<analyze>" not in text or not _CRITERION.search(rest):
    return None
  return text.strip()


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Which answer is better, and what the judge thinks of the rubric; None without one."""

  answer: Letter
  rubric: RubricLabel | None


_VERDICT = re.compile(
  r"\s*<analyze>(?P<analysis>.*?)</analyze>\s*"
  r"(?:<rubric>\s*(?P<rubric>helpful|misleading)\s*</rubric>\s*)?"
  r"<answer>\s*(?P<answer>[AB])\s*</answer>\s*",
  re.DOTALL,
)
_TAGS = re.compile(r"</?(?:analyze|rubric|answer)>")


def read_verdict(text: str, *, with_rubric: bool) -> Verdict | None:
  """A reply in the required order, each tag once; None otherwise."""
  found = _VERDICT.fullmatch(text)
  if found is None or (found["rubric"] is not None) != with_rubric:
    return None
  if len(_TAGS.findall(text)) != (6 if with_rubric else 4):
    return None
  return Verdict("A" if found["answer"] == "A" else "B", found["rubric"])  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- synthesis


@dataclasses.dataclass(unsafe_hash=True)
class C2Config(Config):
  """Settings of the synthesis of rubrics. Judge and generator have their own sampling settings: in
  the source the generator has temperature 1, top-p .9 and 1024 tokens, the judge is greedy with
  512.

  Attributes:
    rubrics: K.
    rounds: attempts to sample readable rubrics, the first included.
    seed: with the pair it addresses all randomness.
    order_seed: decides which answer of a pair stands first (``arrange``).
  """

  rubrics: AtLeastTwo = 16
  rounds: PositiveInt = 5
  seed: int = 0
  order_seed: int = 13


@dataclasses.dataclass(frozen=True)
class Synthesis:
  """The result for a pair.

  Attributes:
    pair: the pair.
    rubrics: those that could be read, K at most.
    without: m_0.
    margins: m_r of each.
    selection: None where the pair is not kept.
  """

  pair: Pair
  rubrics: tuple[str, ...]
  without: float
  margins: tuple[float, ...]
  selection: Selection | None

  @property
  def chosen(self) -> str:
    """r+. Raises ValueError where the pair is not kept."""
    return self.rubrics[self._selected().most_helpful]

  @property
  def rejected(self) -> str:
    """r-. Raises ValueError where the pair is not kept."""
    return self.rubrics[self._selected().most_misleading]

  def _selected(self) -> Selection:
    if self.selection is None:
      raise ValueError(f"pair {self.pair.id} has no helpful or no misleading rubric.")
    return self.selection


async def synthesise(
  pair: Pair, generator: Judge, judge: LetterJudge, config: C2Config
) -> Synthesis:
  """Step 1 for one pair."""
  return await weigh(pair, await write_rubrics(pair, generator, config), judge, config)


async def write_rubrics(pair: Pair, generator: Judge, config: C2Config) -> tuple[str, ...]:
  """The rubrics of a pair that could be read, K at most."""
  config.validate()
  key = question_key(config.seed, pair.id)
  messages = rubric_messages(pair, key=key)
  rubrics: dict[int, str] = {}
  for turn in range(config.rounds):
    open_places = [place for place in range(config.rubrics) if place not in rubrics]
    replies = await asyncio.gather(
      *(ask(generator, messages, key=question_key(key, turn, place)) for place in open_places)
    )
    for place, reply in zip(open_places, replies, strict=True):
      rubric = read_rubric(reply)
      if rubric is not None:
        rubrics[place] = rubric
    if len(rubrics) == config.rubrics:
      break
  return tuple(rubrics[place] for place in sorted(rubrics))


async def weigh(
  pair: Pair, rubrics: Sequence[str], judge: LetterJudge, config: C2Config
) -> Synthesis:
  """The judge's margin on the pair without and with each rubric."""
  key = question_key(config.seed, pair.id)
  asked: list[str | None] = [None, *rubrics]
  without, *margins = await asyncio.gather(*(measure(pair, r, judge, key=key) for r in asked))
  return Synthesis(pair, tuple(rubrics), without, tuple(margins), select(without, margins))


async def measure(pair: Pair, rubric: str | None, judge: LetterJudge, *, key: int) -> float:
  """The judge's margin on a pair: it argues, and at its verdict the log-probs of both letters are
  taken."""
  messages = verdict_messages(pair, rubric, key=key)
  reply = await ask(judge, messages, key=key)
  opening = reply.partition("<answer>")[0] + "<answer>"
  first, second = await retry(lambda: judge.log_probs(messages, opening, ("A", "B")))
  return margin({"A": first, "B": second}, pair.label)


# -------------------------------------------------------------------------------------- inference


@dataclasses.dataclass(frozen=True)
class Preference:
  """What C2's two models say of a pair.

  Attributes:
    answer: the better one; None where the judge's last reply cannot be read.
    by_rubric: whether the judge called the rubric helpful and judged by it.
  """

  answer: Letter | None
  by_rubric: bool


async def prefer(
  answers: Answers, generator: Judge, judge: Judge, *, rounds: int = 1
) -> Preference:
  """Step 4: the judge's preference by a rubric, or without one where it does not help.

  Args:
    answers: the pair; its id addresses the randomness of both models.
    generator: writes the rubric.
    judge: compares with it, and without if it does not call it helpful.
    rounds: attempts to sample a rubric that can be read; without one the judge has none.
  """
  key = question_key(answers.id)
  messages = rubric_messages(answers, key=key)
  rubric = None
  for turn in range(rounds):
    rubric = read_rubric(await ask(generator, messages, key=question_key(key, turn)))
    if rubric is not None:
      break
  if rubric is not None:
    reply = await ask(judge, verdict_messages(answers, rubric, key=key), key=key)
    verdict = read_verdict(reply, with_rubric=True)
    if verdict is not None and verdict.rubric == "helpful":
      return Preference(verdict.answer, by_rubric=True)
  reply = await ask(judge, verdict_messages(answers, None, key=key), key=key)
  verdict = read_verdict(reply, with_rubric=False)
  return Preference(None if verdict is None else verdict.answer, by_rubric=False)


# ----------------------------------------------------------------------------- what is trained on


def verifier_tasks(syntheses: Sequence[Synthesis], *, seed: int, source: str = "c2") -> list[Task]:
  """Step 3: three tasks a pair that was kept; ``task.answer`` is "A", "B helpful" and the like."""
  tasks: list[Task] = []
  for s in syntheses:
    if s.selection is None:
      continue
    key = question_key(seed, s.pair.id)
    for rubric, label in ((None, ""), (s.chosen, " helpful"), (s.rejected, " misleading")):
      messages = verdict_messages(s.pair, rubric, key=key)
      tasks.append(Task(len(tasks), messages, s.pair.label + label, source))
  return tasks


def _read(trajectory: Trajectory, task: Task) -> tuple[Verdict | None, str, str | None]:
  """(verdict, right letter, right rubric label or None)."""
  letter, _, label = task.answer.partition(" ")
  if letter not in ("A", "B") or label not in ("", "helpful", "misleading"):
    raise ValueError(
      f"task {task.id} of {task.source!r} has the answer {task.answer!r}; allowed: a letter A or "
      "B, and 'helpful' or 'misleading' after a blank where there is a rubric."
    )
  reply = final_answer(trajectory, task)
  verdict = None if reply is None else read_verdict(reply, with_rubric=bool(label))
  return verdict, letter, label or None


def c2_preference(trajectory: Trajectory, task: Task) -> float:
  """+1 for the better answer, -1 for the other or for a reply that cannot be read."""
  verdict, letter, _ = _read(trajectory, task)
  return 1.0 if verdict is not None and verdict.answer == letter else -1.0


def c2_rubric(trajectory: Trajectory, task: Task) -> float:
  """+1 for the right word on the rubric, -1 for the other or none; 0 where there is no rubric."""
  verdict, _, label = _read(trajectory, task)
  if label is None:
    return 0.0
  return 1.0 if verdict is not None and verdict.rubric == label else -1.0


def c2_format(trajectory: Trajectory, task: Task) -> float:
  """+1 for analysis, word on the rubric and verdict in their order, -1 otherwise."""
  return -1.0 if _read(trajectory, task)[0] is None else 1.0
