"""Which sampler a config names, and the one that starts more episodes than it needs."""

from __future__ import annotations

import asyncio
import dataclasses
import math

from agentjax.config import check
from agentjax.engine.request import Sample
from agentjax.names import is_own, load, wrong
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.branching import BranchSampler
from agentjax.rollout.config import OversampleConfig, RolloutConfig
from agentjax.rollout.group import Crew, Group, Sampler
from agentjax.rollout.monte_carlo import MonteCarlo
from agentjax.rollout.program import Episode
from agentjax.trajectory.record import Trajectory


def build_sampler(config: RolloutConfig, rewards: RewardGraph) -> Sampler | None:
  """The sampler of ``config.sampler``; None where episodes are independent.

  Args:
    config: which, and its settings.
    rewards: what completions earn.

  Raises:
    ConfigError: completions of rewards that compare the members of a group; a name that leads
      nowhere.
  """
  match config.sampler:
    case "branch":
      return BranchSampler(config.branch)
    case "oversample":
      return Oversample(config.oversample)
    case "monte_carlo":
      check(
        not rewards.needs_groups,
        "config.rollout.sampler",
        config.sampler,
        "another with parts of the reward that compare the members of a group",
      )
      return MonteCarlo(config.monte_carlo, rewards)
    case name if is_own(name):
      path, allowed = "config.rollout.sampler", "a Sampler, or what makes one without arguments"
      found = load(name, path, allowed)
      made = found() if callable(found) else found
      if not hasattr(made, "sample"):
        raise wrong(name, path, made, allowed)
      return made
    case _:
      return None


@dataclasses.dataclass(frozen=True)
class Oversample:
  """The first ``group.size`` of more episodes, by ``OversampleConfig.rule``.

  Who is abandoned is cancelled where it stands: its slot and its environment are free at once.
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
  """Episodes of which those with the lowest ranks win."""

  def __init__(self, group: Group, rule: str):
    self.crew = Crew()
    self._group, self._rule = group, rule
    self._ended: dict[int, Trajectory] = {}  # in the order they ended
    self._running: dict[int, asyncio.Task[None]] = {}
    self._tokens: dict[int, int] = {}  # at least so many, of those at work

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
    """An episode at work will have at least so many tokens."""
    self._tokens[sample] = tokens
    self._abandon()

  def _abandon(self) -> None:
    """Cancels whoever cannot win any more."""
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
  """Tells a race how long an episode has become."""

  race: _Race
  sample: int

  async def before(self, episode: Episode) -> None:
    self.race.grown(self.sample, episode.length)

  def after(self, episode: Episode, sample: Sample) -> None:
    del sample
    self.race.grown(self.sample, episode.length)


def _tokens(trajectory: Trajectory) -> int:
  return sum(map(len, trajectory.segments))
