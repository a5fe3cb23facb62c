"""The sampler that starts more episodes than it needs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Annotated, Literal

from agentjax.config import Range
from agentjax.engine.request import Sample
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Crew, Group
from agentjax.rollout.program import Episode
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class OversampleConfig(SamplerConfig):
  """Starts more episodes than a group needs and takes the first ones.

  Attributes:
    factor: ``ceil(factor * group_size)`` episodes start.
    rule: which ones make the group. "shortest": those with the fewest tokens, prompt included, then
      the lowest sample number; this does not depend on time, and episodes that can no longer be
      among them are abandoned. "first": those that end first; the others are then abandoned. This
      depends on the machine and favours quick tools. Both favour short episodes. An episode whose
      environment failed is taken only if too few others are left.
  """

  factor: Annotated[float, Range(1)] = 1.5
  rule: Literal["shortest", "first"] = "shortest"

  def build(self, rewards: RewardGraph) -> Oversample:
    """See ``SamplerConfig.build``."""
    return Oversample(self)


@dataclasses.dataclass(frozen=True)
class Oversample:
  """The first ``group.size`` of more episodes, by ``OversampleConfig.rule``.

  An abandoned episode is cancelled at once, which frees its slot and its environment.
  """

  config: OversampleConfig

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    race = _Race(group, self.config.rule)
    for sample in range(math.ceil(self.config.factor * group.size)):
      race.enter(sample)
    await race.crew.join()
    return group.settle(race.winners())


class _Race:
  """Running episodes; those with the lowest ranks win."""

  def __init__(self, group: Group, rule: str):
    self.crew = Crew()
    self._group, self._rule = group, rule
    self._ended: dict[int, Trajectory] = {}  # in the order they ended
    self._running: dict[int, asyncio.Task[None]] = {}
    self._tokens: dict[int, int] = {}  # at least this many, of those at work

  def enter(self, sample: int) -> None:
    self._running[sample] = self.crew.start(self._run(sample))

  def winners(self) -> list[Trajectory]:
    """The best ``group.size`` of those that ended."""
    order = list(self._ended)
    if self._rule == "shortest":
      order.sort(key=lambda s: (_tokens(self._ended[s]), s))
    order.sort(key=lambda s: self._ended[s].status.broken)  # stable: last resort
    return [self._ended[s] for s in order[: self._group.size]]

  async def _run(self, sample: int) -> None:
    trajectory = await self._group.episode(sample, watcher=_Length(self, sample))
    self._ended[sample] = trajectory
    del self._running[sample]
    self._abandon()

  def grown(self, sample: int, tokens: int) -> None:
    """A running episode will have at least this many tokens."""
    self._tokens[sample] = tokens
    self._abandon()

  def _abandon(self) -> None:
    """Cancels episodes that cannot win any more."""
    winners = self.winners()
    if len(winners) < self._group.size or winners[-1].status.broken:
      return
    worst = (_tokens(winners[-1]), winners[-1].sample)
    for sample, task in list(self._running.items()):
      if self._rule == "first" or (self._tokens.get(sample, 0), sample) > worst:
        del self._running[sample]
        task.cancel()


@dataclasses.dataclass(frozen=True)
class _Length:
  """Reports the length of an episode to a race."""

  race: _Race
  sample: int

  async def before(self, episode: Episode) -> None:
    self.race.grown(self.sample, episode.length)

  def after(self, episode: Episode, sample: Sample) -> None:
    del sample
    self.race.grown(self.sample, episode.length)


def _tokens(trajectory: Trajectory) -> int:
  return sum(map(len, trajectory.segments))
