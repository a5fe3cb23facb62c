r"""What Agent0 pays the author of questions: hard but answerable, new, and solved with tools.

    R = min(p, 1 - p) - share of the batch in the question's cluster + .05 min(tool calls, 4)

p is the self-consistency of the solver's answers; without a question the first term is -1. Clusters
are joined as long as the mean distance of their members, 1 - BLEU, is below .5.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from agentjax.config import Config, NonNegativeFloat, NonNegativeInt, PositiveShare


@dataclasses.dataclass(unsafe_hash=True)
class QuestionRewardConfig(Config):
  """Settings; the defaults are those of Agent0's code.

  Attributes:
    distance: mean distance below which two clusters are joined.
    per_call: paid for each of at most ``most_calls`` tool calls of the solver.
  """

  distance: PositiveShare = 0.5
  per_call: NonNegativeFloat = 0.05
  most_calls: NonNegativeInt = 4


def question_rewards(
  questions: Sequence[str | None],
  consistencies: Sequence[float],
  calls: Sequence[int],
  config: QuestionRewardConfig | None = None,
) -> list[float]:
  """One reward a question of a batch.

  Args:
    questions: texts; None where the author wrote none, and "" is none.
    consistencies: p of each, 0..1; not read without a question.
    calls: tool calls of the solver.
    config: the defaults if None.
  """
  settings = config or QuestionRewardConfig()
  written = [i for i, text in enumerate(questions) if text and text.strip()]
  texts = [(questions[i] or "").split() for i in written]
  shares = dict(zip(written, cluster_shares(texts, len(questions), settings.distance), strict=True))
  alone = 1 / max(len(questions), 1)
  result = []
  for i, (p, count) in enumerate(zip(consistencies, calls, strict=True)):
    worth = min(p, 1 - p) if i in shares else -1.0
    bonus = settings.per_call * min(count, settings.most_calls) if i in shares else 0.0
    result.append(worth - shares.get(i, alone) + bonus)
  return result


def cluster_shares(texts: Sequence[Sequence[str]], number: int, most: float) -> list[float]:
  """For each text the share of all ``number`` that are in its cluster, by average linkage."""
  distance = np.array([[1 - (bleu(a, b) + bleu(b, a)) / 2 for b in texts] for a in texts])
  clusters = [[i] for i in range(len(texts))]
  while len(clusters) > 1:
    means = {
      (a, b): float(np.mean(distance[np.ix_(clusters[a], clusters[b])]))
      for a in range(len(clusters))
      for b in range(a + 1, len(clusters))
    }
    first, second = min(means, key=lambda pair: means[pair])
    if means[first, second] >= most:
      break
    clusters[first] += clusters.pop(second)
  sizes = {i: len(cluster) for cluster in clusters for i in cluster}
  return [sizes[i] / number for i in range(len(texts))]


def bleu(words: Sequence[str], reference: Sequence[str], longest: int = 4) -> float:
  """BLEU of one sentence, 0..1, with 1 added to counts above single words (2002's, smoothed)."""
  if not words or not reference:
    return 0.0
  total = 0.0
  for size in range(1, longest + 1):
    ours, theirs = (
      collections.Counter(zip(*(w[i:] for i in range(size)), strict=False))
      for w in (words, reference)
    )
    common, count = (ours & theirs).total(), ours.total()
    extra = int(size > 1)
    if not common + extra:
      return 0.0
    total += math.log((common + extra) / (count + extra)) / longest
  return math.exp(total + min(0.0, 1 - len(reference) / len(words)))
