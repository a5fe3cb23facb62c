"""RationalRewards (2604.11626): a critique with a grade for each aspect, as one number.

A judge writes an analysis of the request, a detailed judgement, a summary and a refined request; in
the judgement each aspect has a grade from 1 to 4, or N/A. The reward is ``(mean of the grades that
are not N/A - 1) / 3``. For pairs the sums over the aspects are compared; an aspect without a grade
counts 2.5.

Rationales for training are written by a model that knows the label. They are kept only if the label
can be predicted from them (``consistent``; 72 % in the paper). The student that is fine-tuned on
them never sees the label.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from agentjax.trajectory.record import Reward

GENERATION = ("text_faithfulness", "physical_quality", "text_rendering")
EDITING = ("text_faithfulness", "image_faithfulness", "physical_quality", "text_rendering")
MISSING = 2.5  # a grade in a pairwise sum where there is none: the middle of the scale

_SECTIONS = ("request analysis", "detailed judgement", "summary", "request refinement")
_HEADING = re.compile(
  r"^[ \t#*\d.)<]*("
  + "|".join(s.replace("judgement", "judge?ment") for s in _SECTIONS)
  + r")[ \t*:>]*$",
  re.IGNORECASE | re.MULTILINE,
)
_MARKS = r"[\s*_\"'`]*+"  # possessive: two of them may meet
_GRADE = r"(N\s*/\s*A|[+-]?\d+(?:\.\d+)?)"
# A name begins a line or an item of a list, so that no aspect takes the grade of another whose name
# ends with its own, such as "image faithfulness" for "faithfulness".
_BEGIN = r"(?:^|[,;:.|)–—•])[ \t#>*+_\"'`(\[-]*+"


@dataclasses.dataclass(frozen=True)
class Critique:
  """What a judge wrote.

  Attributes:
    grades: aspect -> grade in [1, 4], or None for N/A. Aspects that could not be read are left out.
    sections: heading in lower case -> text, of those that were found.
  """

  grades: Mapping[str, float | None]
  sections: Mapping[str, str]

  @property
  def refined_request(self) -> str | None:
    """The judge's better request, with which one may generate again (test-time refinement)."""
    return self.sections.get("request refinement")


def critique_request(aspects: Sequence[str]) -> str:
  """Asks for the four sections of a critique, with a grade for each aspect in the second."""
  lines = "\n".join(f"{aspect}: 1 to 4, or N/A, and why" for aspect in aspects)
  return (
    "Write a critique of the answer under these four headings, each on a line of its own.\n\n"
    "## Request analysis\nWhat is asked for.\n\n"
    f"## Detailed judgement\n{lines}\n\n"
    "## Summary\nWhat is good and what is not.\n\n"
    "## Request refinement\nThe request in words that would lead to a better answer."
  )


def read_critique(text: str, aspects: Sequence[str] = GENERATION) -> Critique:
  """Reads grades and sections. If an aspect is graded twice, the last grade in range counts.

  Args:
    text: the judge's reply.
    aspects: their names; in the reply blanks or hyphens may stand for underscores. A name begins
      a line or an item of a list.
  """
  marks = list(_HEADING.finditer(text))
  ends = [mark.start() for mark in marks[1:]] + [len(text)]
  sections = {
    mark[1].lower().replace("judgment", "judgement"): text[mark.end() : end].strip()
    for mark, end in zip(marks, ends, strict=False)  # without a mark there is an end too many
  }
  body = sections.get("detailed judgement", text)
  grades: dict[str, float | None] = {}
  for aspect in aspects:
    pattern = rf"{_BEGIN}{name_pattern(aspect)}{_GRADE}"
    for found in re.findall(pattern, body, re.IGNORECASE | re.MULTILINE):
      if found.upper().startswith("N"):
        grades[aspect] = None
      elif 1 <= float(found) <= 4:
        grades[aspect] = float(found)
  return Critique(grades, sections)


def name_pattern(aspect: str) -> str:
  """Regular expression of an aspect's name and all that stands between it and its grade."""
  name = r"[ _-]*".join(map(re.escape, aspect.split("_")))
  return rf"{name}{_MARKS}(?:\(?score\)?|grade)?{_MARKS}[:=]{_MARKS}"


def critique_reward(
  critique: Critique, *, unreadable: Literal["invalid", "zero"] = "invalid"
) -> Reward:
  """``(mean grade - 1) / 3`` over the aspects that have a grade.

  Args:
    critique: what was read.
    unreadable: result for a critique without any grade. The paper gives 0, so a policy learns to
      avoid what confuses its judge; our default is invalid.
  """
  grades = [grade for grade in critique.grades.values() if grade is not None]
  if grades:
    return Reward((sum(grades) / len(grades) - 1.0) / 3.0)
  return Reward(0.0) if unreadable == "zero" else Reward.invalid("the critique has no grade")


def preference_sum(critique: Critique, aspects: Sequence[str] = GENERATION) -> float:
  """Sum over the aspects, 2.5 for one without a grade; the larger of two is preferred."""
  grades = [critique.grades.get(aspect) for aspect in aspects]
  return sum(MISSING if grade is None else grade for grade in grades)


@dataclasses.dataclass(frozen=True)
class Rationale:
  """A rationale by a model that knew the label, which it should lead to."""

  question: str
  text: str
  label: str


async def consistent(
  rationales: Sequence[Rationale],
  predict: Callable[[str, str], Awaitable[str | None]],
  strip: Callable[[str], str] = lambda text: text,
) -> tuple[list[Rationale], float]:
  """The rationales from which the label is predicted back, and their share.

  Args:
    rationales: of the label-anchored phase.
    predict: (question, rationale) -> label, or None where it gives none. It must not see the label.
    strip: removes the label from the text of a rationale.
  """
  kept = [r for r in rationales if await predict(r.question, strip(r.text)) == r.label]
  return kept, len(kept) / len(rationales) if rationales else 0.0
