r"""Reward denoising of AgentCPM-Explore: what a step is not trained on, and a bonus by turns.

1. A group whose members differ by less than ``least_range`` in ``part`` is dropped. Neither the
   rest of the reward nor the bonus of rule 4 is looked at: it would keep groups that are all wrong.
2. A right answer in so few turns that it may be luck is dropped.
3. Without ``spread``, episodes that ran out of tokens or turns are dropped, but for a few.
4. With ``spread``, they stay, and what is left is ranked by its number of turns::

     reward += spread (1/2 - place) of right ones, spread (place - 1/2) of wrong ones,

   where place goes from 0, fewest turns, to 1 in even distances, among those of one kind; equal
   ones are in the middle of theirs, and one alone gets nothing. The sum over a kind is 0.

With ``balance``, rules 2 to 4 are replaced: a group keeps at most one more wrong and two more right
episodes than it has of the rarer kind.

Reference: 2602.06485 and its code (OpenBMB/AgentCPM, ``rollout/mcp/_rewarding.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax.config import NonNegativeFloat, NonNegativeInt
from agentjax.rewards.scorers import turns
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.episode_groups import generator, usable_groups, value_of
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

_NO_TASK = Task(0, (), "", "")
_MORE_WRONG, _MORE_RIGHT = 1, 2


@dataclasses.dataclass(unsafe_hash=True)
class DenoiseConfig(SignalConfig):
  """Settings; the defaults are those of the released code.

  Attributes:
    part: of the reward; an episode that has 1 or more of it is right.
    least_range: of the part in a group, largest less smallest.
    few_turns: a right episode with so many turns or fewer is dropped.
    truncated: episodes of a group that may have run out of tokens or turns, drawn by chance.
    spread: between the fewest and the most turns; 0 is without, .2 the code's efficient mode.
    balance: see the module.
    seed: of the draws. Ours.
  """

  part: str = "exact_match"
  least_range: NonNegativeFloat = 0.1
  few_turns: NonNegativeInt = 1
  truncated: NonNegativeInt = 0
  spread: NonNegativeFloat = 0.0
  balance: bool = False
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """The reward must have the part, and settings of one rule exclude those of another."""
    require, parts = self.requirements(path), experiment.reward.parts
    require(self.part in parts, "part", f"one of config.reward.parts = {parts}")
    require(not (self.balance and self.spread), "spread", f"0 with {path}.balance")
    all_stay = self.balance or bool(self.spread)
    said = f"0 with {path}.balance or {path}.spread, which drop no episode that ran out"
    require(not (all_stay and self.truncated), "truncated", said)

  def build(self, tools: SignalTools) -> Denoise:
    """See ``SignalConfig.build``."""
    del tools
    return Denoise(self)


class Denoise(Signal):
  """See the module. If nothing would be left, the step keeps its episodes.

  Metrics: ``denoise/kept``, share of the episodes; ``denoise/groups``, share of the groups.

  Args:
    config: see DenoiseConfig.
  """

  name = "denoise"

  def __init__(self, config: DenoiseConfig):
    self._config = config

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    groups = usable_groups(episodes)
    kept: dict[int, Trajectory] = {}
    left = 0
    for key, members in groups.items():
      chosen = self._choose(members, generator(self._config.seed, key))
      left += bool(chosen)
      kept |= {id(one): self._paid(one, chosen) for one in chosen}
    result = [kept[id(one)] for one in episodes if id(one) in kept]
    return result or list(episodes), {
      "denoise/kept": len(result) / max(len(episodes), 1),
      "denoise/groups": left / max(len(groups), 1),
    }

  def _choose(self, members: list[Trajectory], random: np.random.Generator) -> list[Trajectory]:
    settings, scores = self._config, [self._score(one) for one in members]
    if max(scores) - min(scores) < settings.least_range:
      return []
    if settings.balance:
      return [members[i] for i in self._balanced(members, random)]
    cut = [i for i, one in enumerate(members) if one.status is Status.TRUNCATED]
    spared = set(cut if settings.spread else _draw(cut, settings.truncated, random))
    return [
      one
      for i, one in enumerate(members)
      if (i in spared or i not in cut)
      and not (self._right(one) and turns(one, _NO_TASK) <= settings.few_turns)
    ]

  def _balanced(self, members: list[Trajectory], random: np.random.Generator) -> list[int]:
    right = [i for i, one in enumerate(members) if self._right(one)]
    wrong = [i for i, one in enumerate(members) if not self._right(one)]
    fewer = min(len(right), len(wrong))
    drawn = _draw(right, fewer + _MORE_RIGHT, random) + _draw(wrong, fewer + _MORE_WRONG, random)
    return sorted(drawn)

  def _paid(self, episode: Trajectory, chosen: Sequence[Trajectory]) -> Trajectory:
    """A copy with the bonus of its turns among those that are left."""
    right = self._right(episode)
    lengths = np.array([turns(one, _NO_TASK) for one in chosen if self._right(one) == right])
    if not self._config.spread or len(lengths) < 2:
      return episode
    own = turns(episode, _NO_TASK)
    rank = float(np.sum(lengths < own) + (np.sum(lengths == own) - 1) / 2)
    longer = rank / (len(lengths) - 1) - 0.5
    bonus = self._config.spread * (-longer if right else longer)
    return dataclasses.replace(episode, reward=Reward(value_of(episode) + bonus))

  def _score(self, episode: Trajectory) -> float:
    part = episode.reward_parts.get(self._config.part)
    return 0.0 if part is None or part.value is None else part.value

  def _right(self, episode: Trajectory) -> bool:
    return self._score(episode) >= 1


def _draw(places: list[int], most: int, random: np.random.Generator) -> list[int]:
  """All of them, or ``most`` by chance."""
  if len(places) <= most:
    return places
  return sorted(random.choice(places, most, replace=False).tolist())
