r"""Self-critique: the answers of a group are compared by the policy that wrote them.

A group has two stages. First its members answer. Then the policy, with the weights that it has at
that moment, compares them in pairs, each pair in both orders (``critique``):

* a task with a verifier: pairs whose members the verifier tells apart. An answer is paid by the
  verifier; a critique is paid if it agrees with the verifier, and is trained on. So the critic
  stays in step with the policy. Critiques are episodes of the agent "critic", with a group of their
  own: they are compared with the other critiques of the task, never with answers.
* a task without: all pairs of the pairing. The part "preferred" of answer i is

      preferred_i = 1 / |V_i| sum_{v in V_i} (1 if v prefers i, 1/2 if v is a tie, else 0)

  over the verdicts V_i on i that can be read. Nothing says whether they are right, so these
  critiques are neither trained on nor recorded.

The two orders of a pair make a critic that always takes the first answer worth nothing: it prefers
each member as often as not.

Reference: Kimi K2, 2507.20534, from memory: pairwise comparisons by core, prescriptive and
human-annotated rubrics, and a critic that verifiable rewards keep up to date. Its words, pairing
and the reward of the critic are not known to us; those here are ours.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal

from agentjax.config import AtLeastTwo, ConfigError, Share, check
from agentjax.recipes.self_critique.critique import (
  CRITIC,
  CritiqueEnvironment,
  Rubrics,
  Verdict,
  critique_messages,
)
from agentjax.rewards.graph import RewardGraph, Scorer
from agentjax.rewards.judges import question_key
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Group, side_by_side
from agentjax.rollout.program import tool_episode
from agentjax.rollout.scoring import score
from agentjax.text.chat import Chat
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

CRITIQUED = "self_critique"  # in the metadata of an answer: what the group knows of it
NEUTRAL = 0.5  # preferred, where no verdict can be read

Pair = tuple[int, int]


def is_critique(trajectory: Trajectory, task: Task) -> float:
  """1 for a critique, 0 for an answer."""
  del task
  return float(any(segment.agent == CRITIC for segment in trajectory.segments))


def is_verified(trajectory: Trajectory, task: Task) -> float:
  """Whether the verifier pays the answer; in an evaluation, whether the task has an answer."""
  return float(trajectory.metadata.get(CRITIQUED, {}).get("verified", bool(task.answer)))


def preferred(trajectory: Trajectory, task: Task) -> Reward:
  """How often the critic preferred the answer, 0 to 1; 1/2 where nothing was compared."""
  del task
  return Reward(trajectory.metadata.get(CRITIQUED, {}).get("preferred", NEUTRAL))


@dataclasses.dataclass(unsafe_hash=True)
class SelfCritiqueConfig(SamplerConfig):
  """Settings; all defaults are ours.

  It brings the parts "critique", "verified" and "preferred"; the reward is the formula
  ``environment if critique else exact_match if verified else preferred``.

  Attributes:
    rubrics: by what answers are compared.
    verifier: the part of the reward that verifies. Tasks without an ``answer`` have no verifier.
    hidden: share of the tasks whose verifier is not used, chosen by id, so that a data set in which
      all have one can stand for both kinds.
    pairing: "circular" compares each answer with the next, the last with the first; "all" every
      pair.
    most_characters: of an answer that the critic is shown; the end is kept.
  """

  scorers: ClassVar[Mapping[str, Scorer]] = {
    "critique": is_critique,
    "verified": is_verified,
    "preferred": preferred,
  }

  rubrics: Rubrics = dataclasses.field(default_factory=Rubrics)
  verifier: str = "exact_match"
  hidden: Share = 0.0
  pairing: Literal["circular", "all"] = "circular"
  most_characters: AtLeastTwo = 4000

  def check_group(self, group_size: int, path: str) -> None:
    check(group_size >= 2, f"{path}.group_size", group_size, f"2 or more with {path}.sampler")

  def build(self, rewards: RewardGraph) -> SelfCritique:
    """See ``SamplerConfig.build``."""
    needed = ("environment", self.verifier, *self.scorers)
    if missing := [name for name in needed if name not in rewards.part_names]:
      raise ConfigError(
        f"config.reward.parts={rewards.part_names} lacks {', '.join(missing)}; allowed: with "
        "config.rollout.sampler of self-critique, those among them, and a formula such as "
        f"'environment if critique else {self.verifier} if verified else preferred'."
      )
    return SelfCritique(self, rewards)

  def has_verifier(self, task: Task) -> bool:
    """Whether the answers to a task are verified."""
    place = question_key("hidden", task.source, task.id) / 2**63
    return bool(task.answer) and place >= self.hidden


@dataclasses.dataclass(frozen=True)
class SelfCritique:
  """Answers, and the critiques that are trained on; see the module.

  Critiques have samples of their own, from the size of the group on.
  """

  config: SelfCritiqueConfig
  rewards: RewardGraph

  async def sample(self, group: Group) -> list[Trajectory]:
    if _complete(group):
      return group.finished()
    answers = await side_by_side([group.episode(sample) for sample in range(group.size)])
    texts = [self._shown(one, group.player.chat) for one in answers]
    compared = [i for i, text in enumerate(texts) if text is not None]
    asked = pairs_of(compared, self.config.pairing)
    if not self.config.has_verifier(group.task):
      verdicts = await self._critiques(group, texts, [(pair, None) for pair in asked])
      wins = preferences(asked, [_verdict(one) for one in verdicts], len(answers))
      missing = [text is None for text in texts]
      for answer, won, lost in zip(answers, wins, missing, strict=True):
        said = {"verified": False, "critiques": 0, "preferred": 0.0 if lost else won}
        answer.metadata = {**answer.metadata, CRITIQUED: said}
      return group.settle(answers)
    values = await self._verified(group, answers)
    told = [(pair, better) for pair in asked if (better := better_of(pair, values))]
    critiques = await self._critiques(group, texts, told)
    for answer in answers:
      said = {"verified": True, "critiques": len(critiques)}
      answer.metadata = {**answer.metadata, CRITIQUED: said}
    return group.settle([*answers, *critiques])

  def _shown(self, answer: Trajectory, chat: Chat) -> str | None:
    """The last turn of an answer without its reasoning; None where there is no whole answer."""
    drawn = [segment for segment in answer.segments if segment.sampled.any()]
    if answer.status is not Status.OK or not drawn:
      return None
    last = drawn[-1]
    text, _ = chat.parse([int(token) for token in last.token_ids[last.sampled]])
    return text.rpartition("</think>")[2].strip()[-self.config.most_characters :]

  async def _verified(self, group: Group, answers: Sequence[Trajectory]) -> list[float | None]:
    """The verifier's verdicts; the answers themselves are not changed."""
    copies = copy.deepcopy(list(answers))
    await score(self.rewards, copies, group.task, timeout=group.player.config.reward_timeout)
    parts = [one.reward_parts.get(self.config.verifier) for one in copies]
    return [None if part is None else part.value for part in parts]

  async def _critiques(
    self, group: Group, texts: Sequence[str | None], asked: Sequence[tuple[Pair, Verdict | None]]
  ) -> list[Trajectory]:
    """One for every pair, in their order."""

    player = dataclasses.replace(group.player, seats={})  # the policy sits on the critic's

    def episode(place: int, pair: Pair, better: Verdict | None) -> Coroutine[Any, Any, Trajectory]:
      first, second = (texts[i] or "" for i in pair)
      key = question_key("critique", *group.address(group.size + place))
      messages = critique_messages(group.task, first, second, self.config.rubrics, key=key)
      own = dataclasses.replace(
        group, player=player, make_environment=lambda _: CritiqueEnvironment(messages, better)
      )
      return own.episode(group.size + place, program=tool_episode)

    return await side_by_side([episode(place, *one) for place, one in enumerate(asked)])


def pairs_of(members: Sequence[int], pairing: Literal["circular", "all"]) -> list[Pair]:
  """Which members are compared, each pair in both orders; none of fewer than two."""
  count = len(members)
  if pairing == "all":
    chosen = {(i, j) for i in range(count) for j in range(i + 1, count)}
  else:
    circle = [(i, (i + 1) % count) for i in range(count)] if count > 1 else []
    chosen = {(min(pair), max(pair)) for pair in circle}
  return [(members[a], members[b]) for i, j in sorted(chosen) for a, b in ((i, j), (j, i))]


def better_of(pair: Pair, values: Sequence[float | None]) -> Verdict | None:
  """The one that the verifier prefers; None where it does not tell them apart."""
  first, second = (values[i] for i in pair)
  if first is None or second is None or first == second:
    return None
  return "first" if first > second else "second"


def preferences(
  pairs: Sequence[Pair], verdicts: Sequence[Verdict | None], count: int
) -> list[float]:
  """``preferred`` of each of ``count`` members (see the module); 1/2 without any verdict."""
  won: list[list[float]] = [[] for _ in range(count)]
  for (first, second), verdict in zip(pairs, verdicts, strict=True):
    if verdict is not None:
      share = {"first": 1.0, "second": 0.0, "tie": 0.5}[verdict]
      won[first].append(share)
      won[second].append(1.0 - share)
  return [sum(own) / len(own) if own else NEUTRAL for own in won]


def _verdict(critique: Trajectory) -> Verdict | None:
  answer = critique.answer
  return answer if answer in ("first", "second", "tie") else None  # type: ignore[return-value]


def _complete(group: Group) -> bool:
  """Whether all answers and all critiques of the group are known."""
  known = group.finished()
  answers = [one for one in known if one.sample < group.size]
  counts = [one.metadata.get(CRITIQUED, {}).get("critiques", 0) for one in answers]
  critiques = max(counts, default=0)
  return len(answers) == group.size and len(known) == group.size + critiques
