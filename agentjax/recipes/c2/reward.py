"""C2's two models as a part of the reward: pairs of answers, compared by a rubric or without one.

For each pair of answers the generator writes a rubric, and the judge compares the answers by it. If
the judge calls the rubric misleading, or its reply cannot be read, it compares them without
(2604.13618; ``rubrics.prefer``). The reward of an answer is its share of won comparisons, 0 to 1.

Ours, as the source scores given pairs only: which pairs of a group are compared; both orders of a
pair, so that a judge with a habit for one place pays nobody for it; and a further attempt where a
rubric cannot be read, as in the source's synthesis.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from agentjax.adapters.judge_model import JudgeModelConfig, RunJudges
from agentjax.config import PositiveInt
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.recipes.c2.rubrics import Answers, prefer
from agentjax.recipes.c2.synthesis import generator_config
from agentjax.rewards.graph import GroupScorer
from agentjax.rewards.judges import (
  Judge,
  JudgeUnavailableError,
  LengthAlarm,
  final_answer,
  question_key,
)
from agentjax.rewards.scorer_config import GroupScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Task, Trajectory

BY_RUBRIC = "c2/by_rubric"  # a part that is only logged: share of verdicts that a rubric led to
REFERENCE = "reference"  # in the metadata of a task: the answer that others are compared with


def verifier_config() -> JudgeModelConfig:
  """How the trained verifier judges: greedily, with the 2048 tokens that it was trained with."""
  return JudgeModelConfig(sampling=SamplingConfig(temperature=0.0), max_tokens=2048)


@dataclasses.dataclass(unsafe_hash=True)
class C2RewardConfig(GroupScorerConfig):
  """Answers are compared in pairs by C2's generator and verifier; see the module.

  Attributes:
    against: "next" compares each answer with the next of its group, the last with the first; "all"
      every pair of the group; "reference" each answer alone with that of its task:
      ``metadata["reference"]``, or else the task's answer.
    orders: "both" judges a pair in both orders and takes the mean. A pair then has a verdict only
      if both can be read. "drawn" judges it in one, drawn at random.
    rounds: attempts to sample a rubric that can be read.
    generator: writes rubrics, a run of configs/c2_generator.py or an endpoint.
    judge: compares, a run of configs/c2_verifier.py or an endpoint.
    engine: serves each model on disk. Its slots are the questions under way at one time.
    concurrency: pairs of a group under way at a time.
    seed: of the models' randomness, with the addresses of what they compare.
  """

  against: Literal["next", "all", "reference"] = "next"
  orders: Literal["both", "drawn"] = "both"
  rounds: PositiveInt = 5
  generator: JudgeModelConfig = dataclasses.field(default_factory=generator_config)
  judge: JudgeModelConfig = dataclasses.field(default_factory=verifier_config)
  engine: EngineConfig = dataclasses.field(
    default_factory=lambda: EngineConfig(
      slots=16, max_length=10_240, extend_buckets=(128, 1024), extend_rows=(4, 1)
    )
  )
  concurrency: PositiveInt = 16
  seed: int = 0

  def build_group(self, sandboxes: Sandboxes) -> GroupScorer:
    named = {"generator": self.generator, "judge": self.judge}
    models = RunJudges(named, self.engine, self.seed, "config.reward.settings.c2")
    return C2Cohort(models.judges, self, close=models.close)


class UnreadableVerdictError(ValueError):
  """Judges answered, and their answers hold no verdict."""


class _Compared(NamedTuple):
  """A pair of a group: its members by index, the second -1 for the task's own answer."""

  first: int
  second: int


class _Outcome(NamedTuple):
  """What came of a pair.

  Attributes:
    share: of the verdicts that the first won; None without a verdict.
    by_rubric: share of the verdicts that a rubric led to.
    unavailable: whether a model could not be asked.
  """

  share: float | None
  by_rubric: float = 0.0
  unavailable: bool = False


class C2Cohort:
  """The share of comparisons that an answer won, as a group scorer.

  No answer is worth 0 and is not compared; a lone answer without a reference is worth .5. Where a
  model was unavailable for all comparisons of an answer, its reward is invalid. Where the judge
  answered all of them and none can be read, the scorer raises ``UnreadableVerdictError``, and the
  reward graph finds out whether an answer is to blame (``rewards.graph``).

  Args:
    models: "generator" and "judge".
    config: see C2RewardConfig; ``models`` stand in the place of those that it names.
    close: frees the models.
    alarm: gets every reward with its answer's length.
  """

  def __init__(
    self,
    models: Mapping[str, Judge],
    config: C2RewardConfig,
    *,
    close: Callable[[], None] = lambda: None,
    alarm: LengthAlarm | None = None,
  ):
    self._generator, self._judge = models["generator"], models["judge"]
    self._config, self.close = config, close
    self._alarm = alarm or LengthAlarm("c2")

  async def __call__(self, members: Sequence[Trajectory], task: Task) -> list[Reward]:
    answers = [final_answer(member, task) for member in members]
    there = [i for i, answer in enumerate(answers) if answer is not None]
    texts = {i: answers[i] or "" for i in there}
    if self._config.against == "reference":
      texts[-1] = _reference(task)
    pairs = pairs_of(there, self._config.against)
    limit = asyncio.Semaphore(self._config.concurrency)
    async with asyncio.TaskGroup() as group:
      work = [group.create_task(self._compare(pair, texts, members, task, limit)) for pair in pairs]
    outcomes = [one.result() for one in work]
    rewards = [Reward(0.0) for _ in members]
    for i in there:
      rewards[i] = self._reward(i, pairs, outcomes, members[i])
      if rewards[i].value is not None:
        self._alarm.note(rewards[i].value or 0.0, len(texts[i]), task.id)
    return rewards

  def _reward(
    self,
    member: int,
    pairs: Sequence[_Compared],
    outcomes: Sequence[_Outcome],
    trajectory: Trajectory,
  ) -> Reward:
    """The mean over a member's comparisons that have a verdict."""
    won, by_rubric, unavailable = [], [], False
    for pair, outcome in zip(pairs, outcomes, strict=True):
      if member not in pair:
        continue
      unavailable |= outcome.unavailable
      if outcome.share is not None:
        won.append(outcome.share if pair.first == member else 1.0 - outcome.share)
        by_rubric.append(outcome.by_rubric)
    if won:
      trajectory.reward_parts[BY_RUBRIC] = Reward(sum(by_rubric) / len(by_rubric))
      return Reward(sum(won) / len(won))
    if not any(member in pair for pair in pairs):
      return Reward(0.5)
    if unavailable:
      return Reward.invalid("a model was unavailable for all comparisons of this answer")
    raise UnreadableVerdictError(f"no verdict on answer {member} can be read")

  async def _compare(
    self,
    pair: _Compared,
    texts: Mapping[int, str],
    members: Sequence[Trajectory],
    task: Task,
    limit: asyncio.Semaphore,
  ) -> _Outcome:
    """The verdicts on a pair."""
    opponent = ("reference",) if pair.second < 0 else members[pair.second].address
    key = question_key(self._config.seed, *members[pair.first].address, *opponent)
    both = self._config.orders == "both"
    swaps = (False, True) if both else (bool(key % 2),)
    shares, led = [], []
    try:
      for swap in swaps:
        first, second = pair[::-1] if swap else pair
        asked = Answers(question_key(key, swap), task.prompt, texts[first], texts[second])
        async with limit:
          found = await prefer(asked, self._generator, self._judge, rounds=self._config.rounds)
        if found.answer is None:
          return _Outcome(None)
        shares.append(float((found.answer == "A") != swap))
        led.append(found.by_rubric)
    except JudgeUnavailableError:
      return _Outcome(None, unavailable=True)
    return _Outcome(sum(shares) / len(shares), sum(led) / len(led))


def pairs_of(
  members: Sequence[int], against: Literal["next", "all", "reference"]
) -> list[_Compared]:
  """Who is compared with whom, each pair once; none in a group of one without a reference."""
  if against == "reference":
    return [_Compared(i, -1) for i in members]
  count = len(members)
  places = [(i, j) for i in range(count) for j in range(i + 1, count)]
  if against == "next":
    places = [(i, j) for i, j in places if j == i + 1 or (i, j) == (0, count - 1)]
  return [_Compared(members[i], members[j]) for i, j in places]


def _reference(task: Task) -> str:
  """The answer of a task that others are compared with."""
  found = str(task.metadata.get(REFERENCE, "") or task.answer)
  if not found:
    raise LookupError(
      f"task {task.id} of {task.source!r} has no metadata[{REFERENCE!r}] and no answer to compare "
      "with; give it one, or set against='next' or 'all'."
    )
  return found
