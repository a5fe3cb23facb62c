"""Monte-Carlo values of the states between turns, as rewards of turns.

Before a turn of an episode, the same policy plays N completions from there; their rewards give the
value V of that state. Completions are not recorded and not trained on.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from agentjax.config import ConfigError, PositiveInt, check
from agentjax.engine.request import Sample
from agentjax.rewards.graph import RewardGraph, TurnScores
from agentjax.rewards.process import monte_carlo_labels
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Crew, Group
from agentjax.rollout.keys import BASELINE
from agentjax.rollout.program import BranchPoint, Episode
from agentjax.rollout.scoring import score
from agentjax.trajectory.record import MONTE_CARLO, Task, Trajectory


def monte_carlo_part(trajectory: Trajectory, task: Task) -> TurnScores:
  """The part of the reward that ``MonteCarlo`` has computed; none if it did not play."""
  del task
  return TurnScores(trajectory.turn_rewards.get(MONTE_CARLO, [None] * len(trajectory.segments)))


@dataclasses.dataclass(unsafe_hash=True)
class MonteCarloConfig(SamplerConfig):
  r"""Rewards of turns from completions before and after each turn; the part "monte_carlo".

  With V_k the value of the state before turn k, turn k of n is paid

      progress   V_{k+1} - V_k,  V_n = 0
      label      V_{k+1}, and the last turn nothing

  Progress is a potential: with weight 1 an episode earns its outcome minus V_0, and the rewards to
  go of turn k are its outcome minus V_k, as in VinePPO (2410.01679). Labels are Math-Shepherd's
  (2312.08935), where the last step's is the outcome itself; they pay for every turn taken.

  Attributes:
    completions: N from every state; 8 in Math-Shepherd. An episode of n turns costs about
      N (n + 1) / 2 further ones.
    form: see above.
    value: V from the rewards of the N: "mean"; or of those at ``success`` and above "soft", their
      share, or "hard", 1 where there is one.
    success: see ``value``.
  """

  completions: PositiveInt = 8
  form: Literal["progress", "label"] = "progress"
  value: Literal["mean", "soft", "hard"] = "mean"
  success: float = 1.0

  scorers = {MONTE_CARLO: monte_carlo_part}

  def build(self, rewards: RewardGraph) -> MonteCarlo:
    """See ``SamplerConfig.build``."""
    check(
      not rewards.needs_groups,
      "config.rollout.sampler",
      self.chosen,
      "another with parts of the reward that compare the members of a group",
    )
    return MonteCarlo(self, rewards)


@dataclasses.dataclass(frozen=True)
class MonteCarlo:
  """Independent episodes whose turns carry the rewards of ``MonteCarloConfig``.

  Completions have addresses of their own, so a group that is made again after a crash is the same.
  """

  config: MonteCarloConfig
  rewards: RewardGraph

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    crew = Crew()
    members = [_Member(self, group, crew, sample) for sample in range(group.size)]
    try:
      for member in members:
        crew.start(member.play())
      await crew.join()
    finally:
      for member in members:
        member.release()
    return group.settle([member.judged() for member in members])


class _Member:
  """One episode, and the completions from before its turns."""

  def __init__(self, sampler: MonteCarlo, group: Group, crew: Crew, sample: int):
    self._config, self._rewards = sampler.config, sampler.rewards
    self._group, self._crew, self._sample = group, crew, sample
    self._earned: dict[int, np.ndarray] = {}  # by turn, one a completion; NaN without a verdict
    self._points: list[BranchPoint] = []
    self._trajectory: Trajectory | None = None

  async def play(self) -> None:
    self._trajectory = await self._group.episode(self._sample, watcher=self)

  async def before(self, episode: Episode) -> None:
    """Starts completions from here.

    Raises:
      ConfigError: several agents, whose turns one value of a state cannot judge.
    """
    if episode.seat.several:
      raise ConfigError(
        "config.rollout.sampler='monte_carlo' values states for one agent and the environment has "
        f"several, {episode.seat.agent} among them; allowed: another sampler."
      )
    if episode.turn == 0 and self._config.form == "label":
      return
    point = await episode.mark()
    if point is None:
      return
    self._points.append(point)
    count = self._config.completions
    self._earned[episode.turn] = np.full(count, np.nan)
    left = [count]
    for number in range(count):
      self._crew.start(self._complete(point, episode.turn, number, left))

  def after(self, episode: Episode, sample: Sample) -> None:
    """Nothing: the completions before the next turn give the value of this one."""

  async def _complete(self, point: BranchPoint, turn: int, number: int, left: list[int]) -> None:
    group, config = self._group, self._config
    place = (self._sample * group.player.config.max_turns + turn) * config.completions + number
    address = BASELINE - 1 - place
    try:
      one = await group.episode(address, start=point, branch=address)
    finally:
      left[0] -= 1
      if not left[0]:
        point.release()
    await score(self._rewards, [one], group.task, timeout=group.player.config.reward_timeout)
    if one.reward.value is not None:
      self._earned[turn][number] = one.reward.value

  def judged(self) -> Trajectory:
    """The episode with the rewards of its turns."""
    assert self._trajectory is not None
    drawn = [i for i, s in enumerate(self._trajectory.segments) if s.sampled.any()]
    scores = turn_rewards([self._value(turn) for turn in range(len(drawn))], self._config.form)
    values = TurnScores.of_turns(self._trajectory, scores).values
    self._trajectory.turn_rewards[MONTE_CARLO] = list(values)
    return self._trajectory

  def release(self) -> None:
    """Frees the states of completions that never began."""
    for point in self._points:
      point.release()

  def _value(self, turn: int) -> float | None:
    """V before a turn; None where it is not known."""
    earned, config = self._earned.get(turn), self._config
    if earned is None or np.isnan(earned).all():
      return None
    if config.value == "mean":
      return float(np.nanmean(earned))
    successes = np.where(np.isnan(earned), np.nan, earned >= config.success)
    return float(monte_carlo_labels(successes[None], config.value)[0])


def turn_rewards(values: list[float | None], form: str) -> list[float | None]:
  """Rewards of n turns from V before each; None where a value is not known.

  "progress": ``V_{k+1} - V_k``, with V = 0 behind the last. "label": ``V_{k+1}``; the last turn's
  is the outcome, which other parts of the reward give.
  """
  if form == "label":
    return [*values[1:], None][: len(values)]
  later = [*values[1:], 0.0]
  return [
    None if now is None or then is None else then - now
    for now, then in zip(values, later, strict=False)
  ]
