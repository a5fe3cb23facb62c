"""The reward graph: named scorers whose parts are logged one by one, and one formula over them.

A scorer looks at one trajectory and its task and gives a number or a ``Reward``; a group scorer
looks at all trajectories of a task at once. The formula is a tree of the nodes below. A part that
cannot be computed is ``invalid(reason)``, and so is the total: it is never a zero.

An episode may break a scorer. If the scorer works on the same episode with an empty answer, the
episode is at fault, and the part is 0 (or less, if an empty answer is worth less).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agentjax.faults import FAULT, Boundary, Fault, Owner, describe, fault_of
from agentjax.rewards.formula import TERMS, Formula
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TurnScores:
  """A part that is earned turn by turn; the part is their sum.

  Attributes:
    values: one per segment, as in ``Trajectory.turn_rewards``; None for segments that are not
      judged.
  """

  values: Sequence[float | None]

  @classmethod
  def of_turns(cls, trajectory: Trajectory, scores: Sequence[float | None]) -> TurnScores:
    """From a score for each segment that the policy drew, in their order."""
    drawn = [i for i, segment in enumerate(trajectory.segments) if segment.sampled.any()]
    if len(drawn) != len(scores):
      raise ValueError(f"{len(scores)} scores for {len(drawn)} turns")
    values: list[float | None] = [None] * len(trajectory.segments)
    for i, score in zip(drawn, scores, strict=True):
      values[i] = None if score is None else float(score)
    return cls(values)


Score = Reward | float
# What a scorer has to say in words, it leaves in the metadata under the name of its part.
Scorer = Callable[[Trajectory, Task], Score | TurnScores | Awaitable[Score | TurnScores]]
Scores = Sequence[Score | TurnScores]
GroupScorer = Callable[[Sequence[Trajectory], Task], Scores | Awaitable[Scores]]


ENDED = "ended"  # in the metadata: the status that VERIFIER_ERROR took the place of


class Node(Protocol):
  """A formula over the parts of one trajectory; ``rewards.formula.Formula`` is one from a text."""

  def names(self) -> frozenset[str]:
    """The parts the formula reads."""
    ...

  def evaluate(self, parts: Mapping[str, Reward]) -> Reward:
    """The value, or invalid if a part that it depends on is invalid."""
    ...


class RewardGraph:
  """Scorers by name and the formula that makes one reward of their parts.

  Args:
    scorers: part name -> scorer of one trajectory.
    formula: the total; may leave parts out, which are then only logged.
    group_scorers: part name -> scorer of a whole group, for rewards that compare its members.
    formula_at: gives the formula with other numbers, from what puts them into settings; None if
      there are no others.

  Raises:
    ValueError: no scorer at all, a name given twice, or a formula over a part that no scorer makes.
  """

  def __init__(
    self,
    scorers: Mapping[str, Scorer],
    formula: Node,
    group_scorers: Mapping[str, GroupScorer] | None = None,
    formula_at: Callable[[Callable[[Any], Any]], Node] | None = None,
  ):
    self._formula_at = formula_at
    self._scorers = dict(scorers)
    self._group_scorers = dict(group_scorers or {})
    self._formula = formula
    known = set(self._scorers) | set(self._group_scorers)
    if not known:
      raise ValueError("a reward graph needs at least one scorer")
    if twice := sorted(set(self._scorers) & set(self._group_scorers)):
      raise ValueError(f"parts scored twice: {', '.join(twice)}; give each part one scorer")
    if missing := sorted(formula.names() - known):
      raise ValueError(
        f"the formula reads {', '.join(missing)}, which no scorer makes; parts: "
        f"{', '.join(sorted(known))}"
      )

  def at(self, numbers: Callable[[Any], Any]) -> RewardGraph:
    """With other numbers in the formula and the same scorers."""
    if self._formula_at is None:
      return self
    now = copy.copy(self)
    now._formula = self._formula_at(numbers)
    return now

  @property
  def part_names(self) -> tuple[str, ...]:
    return tuple(self._scorers) + tuple(self._group_scorers)

  @property
  def needs_groups(self) -> bool:
    """Whether only ``score_group`` can score: some part compares the members of a group."""
    return bool(self._group_scorers)

  @property
  def refuses(self) -> bool:
    """Whether some part cannot judge every task: its scorer has a method ``refusal``."""
    return any(hasattr(scorer, "refusal") for scorer in self._scorers.values())

  def refusal(self, task: Task) -> str | None:
    """Why a part cannot judge any episode of the task; None where all can."""
    for scorer in self._scorers.values():
      refusal = getattr(scorer, "refusal", None)
      if refusal is not None and (reason := refusal(task)) is not None:
        return str(reason)
    return None

  async def score(self, trajectory: Trajectory, task: Task) -> None:
    """Fills ``trajectory.reward_parts`` and ``trajectory.reward``.

    A broken trajectory (ENV_ERROR, ENGINE_ERROR) is not scored: its reward is invalid. If a part of
    the formula cannot be computed and the episode is not at fault (its scorer raises, or returns
    invalid), or the formula itself fails, the reward is invalid and the status becomes
    VERIFIER_ERROR. Truncated trajectories are scored normally. So is a policy error, which gets at
    most 0 and is never invalid. ``metadata["fault"]`` keeps the fault, ``metadata["reward_terms"]``
    the terms of a formula in text.

    Raises:
      ValueError: the graph has group scorers; use ``score_group``.
    """
    if self.needs_groups:
      raise ValueError(f"parts {', '.join(self._group_scorers)} compare a group; use score_group")
    await self.score_parts(trajectory, task)
    self._finish(trajectory)

  async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> None:
    """``score`` for all trajectories of one task at once, group scorers included.

    Group scorers do not see broken members.
    """
    # At once: a group takes as long as its slowest member.
    await asyncio.gather(*(self.score_parts(trajectory, task) for trajectory in trajectories))
    await self.compare(trajectories, task)

  async def compare(self, trajectories: Sequence[Trajectory], task: Task) -> None:
    """The rest of ``score_group``, for trajectories that ``score_parts`` has seen."""
    members = [t for t in trajectories if not t.status.broken]
    for name, scorer in self._group_scorers.items():
      if not members:
        break
      rewards = await _run_group(name, scorer, members, task)
      for member, reward in zip(members, rewards, strict=True):
        member.reward_parts[name] = reward
    for trajectory in trajectories:
      self._finish(trajectory)

  async def close(self) -> None:
    """Closes the scorers that hold something (a sandbox): those with a ``close``."""
    for scorer in (*self._scorers.values(), *self._group_scorers.values()):
      closing = getattr(scorer, "close", None)
      if closing is not None:
        outcome = closing()
        if inspect.isawaitable(outcome):
          await outcome

  async def score_parts(self, trajectory: Trajectory, task: Task) -> None:
    """Fills the parts that depend only on this trajectory; ``compare`` computes the reward from
    them."""
    if trajectory.task_id != task.id:
      raise ValueError(f"trajectory of task {trajectory.task_id} scored with task {task.id}")
    if trajectory.status.broken:
      return
    for name, scorer in self._scorers.items():
      trajectory.reward_parts[name] = await _run(name, scorer, trajectory, task)

  def _finish(self, trajectory: Trajectory) -> None:
    if trajectory.status.broken:
      failed = "environment" if trajectory.status is Status.ENV_ERROR else "engine"
      trajectory.reward = Reward.invalid(f"the {failed} failed")
      return
    try:
      trajectory.reward = self._formula.evaluate(trajectory.reward_parts)
      paid = getattr(self._formula, "body", self._formula)
      if isinstance(paid, Formula) and paid.recorded and trajectory.reward.valid:
        trajectory.metadata[TERMS] = [list(t) for t in paid.terms(trajectory.reward_parts)]
    except Exception as error:  # an overflow, or a node of the user's own: as for a scorer
      _log.warning("the reward formula failed on %s: %s", trajectory.address, describe(error))
      trajectory.reward = Reward.invalid(describe(error))
    if trajectory.status is Status.POLICY_ERROR:
      # It has lost already: no part may pay it, and none is needed.
      trajectory.reward = Reward(min(trajectory.reward.value or 0.0, 0.0))
    if not trajectory.reward.valid:
      known = trajectory.metadata.get(FAULT)
      fault = None if known is None else Fault.from_dict(known)
      if fault is None or not fault.masks:
        fault = Fault(Owner.VERIFIER, "verifier", trajectory.reward.reason or "")
      leave_without_verdict(trajectory, fault)


def leave_without_verdict(trajectory: Trajectory, fault: Fault) -> None:
  """Masks an episode whose reward could not be computed; ``metadata["ended"]`` tells how it ended.

  A policy error has lost already: it gets 0, and stays one.
  """
  if trajectory.status is Status.POLICY_ERROR:
    trajectory.reward = Reward(0.0)
    return
  trajectory.reward = Reward.invalid(fault.detail)
  trajectory.metadata |= {FAULT: fault.to_dict(), ENDED: str(trajectory.status)}
  trajectory.status = Status.VERIFIER_ERROR


async def _run(name: str, scorer: Scorer, trajectory: Trajectory, task: Task) -> Reward:
  try:
    found = scorer(trajectory, task)
    return _recorded(name, trajectory, await found if inspect.isawaitable(found) else found)
  except Exception as error:
    # It must not end the run, and must not count as a zero if it is our fault.
    _log.warning("scorer %s failed on %s: %s", name, trajectory.address, describe(error))
    fault = fault_of(error, Boundary.VERDICT)
    nothing = None if fault.masks else await _on_nothing(scorer, trajectory, task)
    return _decided(trajectory, fault, nothing)


def _recorded(name: str, trajectory: Trajectory, score: Score | TurnScores) -> Reward:
  """The part; what single turns earned is kept with the episode."""
  if isinstance(score, TurnScores):
    if len(score.values) != len(trajectory.segments):
      raise ValueError(f"{len(score.values)} scores for {len(trajectory.segments)} segments")
    trajectory.turn_rewards[name] = [None if v is None else float(v) for v in score.values]
  return as_reward(score)


async def _on_nothing(scorer: Scorer, trajectory: Trajectory, task: Task) -> float | None:
  """The scorer's result for the emptied episode; None if it fails there too."""
  try:
    found = scorer(emptied(trajectory), task)
    return as_reward(await found if inspect.isawaitable(found) else found).value
  except Exception:
    return None


def emptied(trajectory: Trajectory) -> Trajectory:
  """The episode without content: no tokens, no calls, an empty answer."""
  return dataclasses.replace(
    trajectory,
    segments=[],
    tools=[],
    answer=None if trajectory.answer is None else "",
    reward_parts={},
    turn_rewards={},
    metadata={},
  )


def _decided(trajectory: Trajectory, fault: Fault, nothing: float | None) -> Reward:
  """The part of an episode that broke a scorer; records the fault."""
  if nothing is None and not fault.masks:
    fault = Fault(Owner.VERIFIER, "verifier", fault.detail)
  if fault.masks or FAULT not in trajectory.metadata:
    trajectory.metadata[FAULT] = fault.to_dict()
  if nothing is None:
    return Reward.invalid(fault.detail)
  return Reward(min(0.0, nothing))


async def _run_group(
  name: str, scorer: GroupScorer, trajectories: Sequence[Trajectory], task: Task
) -> list[Reward]:
  async def run(members: Sequence[Trajectory]) -> list[Reward]:
    found = scorer(members, task)
    scores = await found if inspect.isawaitable(found) else found
    if len(scores) != len(members):
      raise ValueError(f"{len(scores)} scores for {len(members)} trajectories")
    return [_recorded(name, one, score) for one, score in zip(members, scores, strict=True)]

  async def works(members: Sequence[Trajectory]) -> bool:
    try:  # on copies, so that no episode keeps what its turns earn beside emptied ones
      await run([dataclasses.replace(t, turn_rewards=dict(t.turn_rewards)) for t in members])
    except Exception:
      return False
    return True

  try:
    return await run(trajectories)
  except Exception as error:  # as in _run
    _log.warning("group scorer %s failed on task %d: %s", name, task.id, describe(error))
    fault = fault_of(error, Boundary.VERDICT)
    culprits = None if fault.masks else await find_culprits(trajectories, works)
    if culprits is None:
      return [_decided(t, fault, None) for t in trajectories]
    kept = [emptied(t) if i in culprits else t for i, t in enumerate(trajectories)]
    try:
      rewards = await run(kept)
    except Exception as other:  # it fails at what no member alone makes it fail at
      return [_decided(t, fault_of(other, Boundary.VERDICT), None) for t in trajectories]
    return [
      _decided(t, fault, r.value) if i in culprits else r
      for i, (t, r) in enumerate(zip(trajectories, rewards, strict=True))
    ]


async def find_culprits(
  members: Sequence[Trajectory], works: Callable[[Sequence[Trajectory]], Awaitable[bool]]
) -> frozenset[int] | None:
  """Indices of the members that make ``works`` fail when all other members are emptied.

  None if it also fails with all members emptied: then no member is at fault.
  """
  blank = [emptied(member) for member in members]
  if not await works(blank):
    return None
  return frozenset(
    [
      index
      for index, member in enumerate(members)
      if not await works([*blank[:index], member, *blank[index + 1 :]])
    ]
  )


def as_reward(score: Score | TurnScores) -> Reward:
  """The result of a scorer as one value, or invalid."""
  if isinstance(score, TurnScores):
    return Reward(float(sum(v for v in score.values if v is not None)))
  return score if isinstance(score, Reward) else Reward(float(score))
