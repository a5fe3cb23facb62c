"""Answers in words against references: exact, contained, token F1, ROUGE."""

from __future__ import annotations

import collections
import dataclasses
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from agentjax.config import PositiveInt
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.text.answers import read_tagged_answer
from agentjax.trajectory.record import Status, Task, Trajectory

Measure = Literal["exact", "contained", "f1", "rouge_1", "rouge_2", "rouge_l"]
Words = Sequence[str]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclasses.dataclass(unsafe_hash=True)
class TextMatchConfig(ScorerConfig):
  """How well an answer in words agrees with the best of its references.

  The references are ``task.metadata["answers"]``, a list of texts, or ``task.answer``. Texts are
  compared as in SQuAD: in small letters, without punctuation, articles and further blanks. A policy
  error, and an episode without an answer, get 0.

  Attributes:
    measure: "exact": the same words; "contained": the words of a reference stand together in the
      answer (sub-EM); "f1": of the words, as often as they occur; "rouge_1", "rouge_2", "rouge_l":
      F1 of words, of pairs of words, of the longest common subsequence.
    tagged: the answer is what stands in the last ``<answer>...</answer>``; for ``rollout.answer``
      "text".
    most_words: a longer answer gets 0, so that listing everything is no answer. Ours.
  """

  measure: Measure = "f1"
  tagged: bool = False
  most_words: PositiveInt = 1000

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""

    def score(trajectory: Trajectory, task: Task) -> float:
      answer = trajectory.answer or ""
      text = read_tagged_answer(answer) if self.tagged else answer
      words = normalised_words(text or "")
      if trajectory.status is Status.POLICY_ERROR or not 0 < len(words) <= self.most_words:
        return 0.0
      references = task.metadata.get("answers") or [task.answer]
      return max(MEASURES[self.measure](words, normalised_words(one)) for one in references)

    return score


def normalised_words(text: str) -> list[str]:
  """Words in small letters, without punctuation and articles (SQuAD, 1606.05250)."""
  return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def contained(words: Words, reference: Words) -> float:
  """1 where the reference's words stand together among ``words``."""
  return float(bool(reference) and f" {' '.join(reference)} " in f" {' '.join(words)} ")


def overlap_f1(words: Words, reference: Words, size: int = 1) -> float:
  """F1 of the runs of ``size`` words, as often as they occur."""
  ours, theirs = (collections.Counter(zip(*(w[i:] for i in range(size)), strict=False))
                  for w in (words, reference))  # fmt: skip
  return _f1((ours & theirs).total(), ours.total(), theirs.total())


def subsequence_f1(words: Words, reference: Words) -> float:
  """F1 of the longest common subsequence (ROUGE-L, one sentence a text)."""
  return _f1(common_subsequence(words, reference), len(words), len(reference))


def common_subsequence(words: Words, others: Words) -> int:
  """Length of the longest common subsequence; bit-parallel, Hyyrö 2004."""
  places: dict[str, int] = collections.defaultdict(int)
  for i, word in enumerate(words):
    places[word] |= 1 << i
  whole = (1 << len(words)) - 1
  free = whole
  for word in others:
    met = free & places.get(word, 0)
    free = ((free + met) | (free - met)) & whole
  return len(words) - free.bit_count()


def _f1(common: int, ours: int, theirs: int) -> float:
  return 2 * common / (ours + theirs) if common else 0.0


MEASURES: Mapping[str, Callable[[Words, Words], float]] = {
  "exact": lambda words, reference: float(list(words) == list(reference)),
  "contained": contained,
  "f1": overlap_f1,
  "rouge_1": overlap_f1,
  "rouge_2": lambda words, reference: overlap_f1(words, reference, 2),
  "rouge_l": subsequence_f1,
}
