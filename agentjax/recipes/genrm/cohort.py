r"""A generative reward model that compares the answers of a group in pairs.

As in NeMo Gym's ``genrm_compare`` (Nemotron 3). Every comparison gives two scores, 1 to 5, and a
ranking, 1 to 6, below 3.5 where the first is better. Where the scores tie, the ranking decides:
``a = 3.5 - ranking``, ``s_1 += a``, ``s_2 -= a``. The reward of an answer is the mean over its
comparisons, and then, with lengths ``l`` and ``u_i = 1 - (l_i - min l) / (max l - min l)``,

  ``reward_i += lambda (u_i - mean_j u_j)``

for the length of the reasoning, of the answer, and for the density of style marks (headers, lists,
bold, emoji a character, code left out), each with its own lambda: shorter and plainer is better,
and the group's mean does not change. A bonus may go to the shortest reasoning of the group, and one
to its shortest answer, if that member is among the best.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from agentjax.adapters.chat_endpoint.judge import HttpJudge, HttpJudgeConfig
from agentjax.config import NonNegativeFloat, PositiveInt, PositiveShare, check
from agentjax.rewards.graph import GroupScorer
from agentjax.rewards.judges import (
  Judge,
  JudgeUnavailableError,
  LengthAlarm,
  Read,
  ask,
  ask_about,
  delimit,
  final_answer,
  last_json_object,
  material_notice,
  nonce,
  number_in,
  question_key,
  question_text,
)
from agentjax.rewards.scorer_config import GroupScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Message, Reward, Task, Trajectory

NEUTRAL = 3.0  # the score of a comparison that could not be read
PRINCIPLE = "principle"  # in the metadata of a task: by what its answers are compared


class Comparison(NamedTuple):
  """Of two answers: scores 1 to 5, and a ranking, 1 (first much better) to 6 (second)."""

  score_1: float = NEUTRAL
  score_2: float = NEUTRAL
  ranking: float = 3.5


@dataclasses.dataclass(unsafe_hash=True)
class GenRMConfig(GroupScorerConfig):
  """The part "genrm": how a group is compared, by which judge, and with which length and style
  terms.

  Attributes:
    pairing: "circular" compares each with the next, the last with the first; "all" every pair once.
    roles: "delimited" puts both answers into one user message, for any judge; "genrm" gives them as
      messages of the roles response_1, response_2 and principle, which a GenRM's template knows.
    reasoning_length, answer_length, style: the lambdas; 0, the default of NeMo Gym, is off. .1
      each for Nemotron 3.
    shortest_reasoning, shortest_answer: bonus to the one shortest of the group that is not empty,
      the first of several, if its member is among the best; 0, the default of NeMo Gym, is off. .5
      each for Nemotron 3.
    best_share: the best are those whose score, before any control, is at least that of the last
      of the best ``best_share`` of the group, rounded down, and at least one.
    missing: reward of a member without an answer; the lowest score. Ours.
    concurrency: comparisons of a group under way at a time. Ours.
    comparer: endpoint that compares; a run needs one.
    seed: of its randomness, with the addresses of what it compares.
  """

  pairing: Literal["circular", "all"] = "circular"
  roles: Literal["delimited", "genrm"] = "delimited"
  reasoning_length: NonNegativeFloat = 0.0
  answer_length: NonNegativeFloat = 0.0
  style: NonNegativeFloat = 0.0
  shortest_reasoning: NonNegativeFloat = 0.0
  shortest_answer: NonNegativeFloat = 0.0
  best_share: PositiveShare = 0.2
  missing: float = 1.0
  concurrency: PositiveInt = 16
  comparer: HttpJudgeConfig | None = None
  seed: int = 0

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    where, allowed = "config.reward.settings.genrm.comparer", "a judge, for the part 'genrm'"
    check(self.comparer is not None, where, self.comparer, allowed)
    assert self.comparer is not None
    return GenRMCohort(HttpJudge(self.comparer), self, seed=self.seed)


def pairs_of(count: int, pairing: Literal["circular", "all"]) -> list[tuple[int, int]]:
  """Which members are compared, first and second; none in a group of one."""
  if count < 2:
    return []
  if pairing == "circular":
    return [(i, (i + 1) % count) for i in range(count)]
  return [(i, j) for i in range(count) for j in range(i + 1, count)]


def decided(comparison: Comparison) -> tuple[float, float]:
  """Both scores, a tie broken by the ranking."""
  first, second, ranking = comparison
  if first == second:
    ahead = 3.5 - ranking
    return first + ahead, second - ahead
  return first, second


def mean_scores(
  count: int, pairs: Sequence[tuple[int, int]], comparisons: Sequence[Comparison | None]
) -> list[float | None]:
  """Mean score of each member over its comparisons.

  Args:
    count: members.
    pairs: who was compared.
    comparisons: one a pair; None where it could not be made.

  Returns:
    ``NEUTRAL`` for a member without comparisons; None if all its comparisons failed.
  """
  got: list[list[float]] = [[] for _ in range(count)]
  planned = {i for pair in pairs for i in pair}
  for pair, comparison in zip(pairs, comparisons, strict=True):
    if comparison is not None:
      for i, score in zip(pair, decided(comparison), strict=True):
        got[i].append(score)
  return [
    sum(own) / len(own) if own else (None if i in planned else NEUTRAL) for i, own in enumerate(got)
  ]


def shortness(lengths: Sequence[float]) -> np.ndarray:
  """``u_i - mean u`` with ``u_i = 1 - (l_i - min) / (max - min)``; zeros where all are equal."""
  values = np.asarray(lengths, np.float64)
  if values.size == 0 or values.max() == values.min():
    return np.zeros(values.shape)
  share = 1.0 - (values - values.min()) / (values.max() - values.min())
  return share - share.mean()


_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_MARKS = (
  re.compile(r"^\s{0,3}#{1,6}\s", re.MULTILINE),  # headers
  re.compile(r"^[ \t]*(?:[-*+•]|\d+[.)])\s", re.MULTILINE),  # lists
  re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),  # bold
  re.compile("[\u2600-\u27bf\u2b50\u2b55\U0001f300-\U0001faff]"),  # emoji
)


def style_density(text: str) -> float:
  """Headers, list items, bold spans and emoji a character, code left out; 0 for no text."""
  plain = _CODE.sub("", text)
  return sum(len(mark.findall(plain)) for mark in _MARKS) / len(plain) if plain else 0.0


def split_reasoning(text: str) -> tuple[str, str]:
  """(reasoning, answer) of a text; the reasoning ends with the last ``</think>``, or is empty."""
  before, found, after = text.rpartition("</think>")
  return (before.removeprefix("<think>"), after.strip()) if found else ("", text)


def controlled(
  scores: Sequence[float],
  reasonings: Sequence[str],
  answers: Sequence[str],
  config: GenRMConfig,
  measure: Callable[[str], float] = len,
) -> list[float]:
  """Scores with length control, bonuses and style penalty; see the module.

  Args:
    scores: one a member.
    reasonings, answers: their texts.
    config: the lambdas.
    measure: length of a text: characters, unless you count tokens.
  """
  base = np.asarray(scores, np.float64)
  total = base.copy()
  if base.size == 0:
    return []
  thought = [measure(text.strip()) for text in reasonings]
  said = [measure(text.strip()) for text in answers]
  total += config.reasoning_length * shortness(thought)
  total += config.answer_length * shortness(said)
  total += config.style * shortness([style_density(text) for text in answers])
  least = np.sort(base)[::-1][max(int(base.size * config.best_share) - 1, 0)]
  for bonus, lengths in ((config.shortest_reasoning, thought), (config.shortest_answer, said)):
    filled = [i for i, length in enumerate(lengths) if length > 0]
    if base.size < 2 or not filled:
      continue
    shortest = min(filled, key=lengths.__getitem__)
    if base[shortest] >= least:
      total[shortest] += bonus
  return [float(x) for x in total]


def comparison_messages(
  question: Sequence[Message],
  first: str,
  second: str,
  *,
  roles: Literal["delimited", "genrm"],
  principle: str = "",
  key: int,
) -> tuple[Message, ...]:
  """What a judge is asked about two answers."""
  if roles == "genrm":
    asked = [*question, Message("response_1", first), Message("response_2", second)]
    return tuple([*asked, Message("principle", principle)] if principle else asked)
  shown = question_text(question)
  mark = nonce(key, shown, first, second, principle)
  material = [delimit("question", shown, mark)]
  material += [delimit("response_1", first, mark), delimit("response_2", second, mark)]
  by = f"by this principle: {principle}" if principle else "by helpfulness and correctness"
  return (
    Message("system", "You compare answers strictly and fairly. " + material_notice(mark)),
    ask_about(
      question,
      "\n\n".join(material) + f"\n\nCompare the two responses {by}. Score each from 1 (worst) to 5 "
      "(best) and rank them from 1 (the first is much better) to 6 (the second is much better). "
      'End with one JSON object: {"score_1": 1 to 5, "score_2": 1 to 5, "ranking": 1 to 6}',
    ),
  )


def read_comparison(reply: str) -> Comparison | None:
  """The verdict of a reply, or None where a number is missing or out of its range."""
  found = last_json_object(reply) or {}
  first, second = (number_in(found.get(f"score_{i}"), 1, 5) for i in (1, 2))
  ranking = number_in(found.get("ranking"), 1, 6)
  if first is None or second is None or ranking is None:
    return None
  return Comparison(first, second, ranking)


class GenRMCohort:
  """Compares the members of a group, as a group scorer: it runs when the last of them has ended.

  An unreadable reply counts as (3, 3, 3.5). A comparison is dropped if its judge stays unavailable;
  a member without any comparison left is invalid.

  Args:
    judge: the generative reward model.
    config: see GenRMConfig.
    read: what of an episode is compared; reasoning up to ``</think>`` is not shown to the judge.
    measure: length of a text.
    seed: with task, step and pair it addresses the judge's randomness.
    alarm: receives every score, before control, with the length of its answer.
  """

  def __init__(
    self,
    judge: Judge,
    config: GenRMConfig,
    *,
    read: Read = final_answer,
    measure: Callable[[str], float] = len,
    seed: int,
    alarm: LengthAlarm | None = None,
  ):
    config.validate()
    self._judge, self._config, self._read, self._measure = judge, config, read, measure
    self._seed, self._alarm = seed, alarm or LengthAlarm("genrm")

  async def __call__(self, trajectories: Sequence[Trajectory], task: Task) -> list[Reward]:
    texts = [self._read(trajectory, task) for trajectory in trajectories]
    present = [i for i, text in enumerate(texts) if text is not None]
    split = [split_reasoning(texts[i] or "") for i in present]
    pairs = pairs_of(len(present), self._config.pairing)
    limit = asyncio.Semaphore(self._config.concurrency)
    addresses = [trajectories[i].address for i in present]

    async def compare(pair: tuple[int, int]) -> Comparison | None:
      first, second = pair
      key = question_key(self._seed, *addresses[first], *addresses[second])
      messages = comparison_messages(
        task.prompt,
        split[first][1],
        split[second][1],
        roles=self._config.roles,
        principle=str(task.metadata.get(PRINCIPLE, "")),
        key=key,
      )
      async with limit:
        try:
          reply = await ask(self._judge, messages, key=key)
        except JudgeUnavailableError:
          return None
      return read_comparison(reply) or Comparison()

    scores = mean_scores(len(present), pairs, await asyncio.gather(*map(compare, pairs)))
    compared = [at for at, score in enumerate(scores) if score is not None]
    final = controlled(
      [score for score in scores if score is not None],
      [split[at][0] for at in compared],
      [split[at][1] for at in compared],
      self._config,
      self._measure,
    )
    rewards = [Reward(self._config.missing)] * len(trajectories)
    for i in present:
      rewards[i] = Reward.invalid("the judge was unavailable for all comparisons of this answer")
    for at, value in zip(compared, final, strict=True):
      rewards[present[at]] = Reward(value)
      self._alarm.note(scores[at] or 0.0, self._measure(split[at][1]), task.id)
    return rewards
