r"""Reward denoising of AgentCPM-Explore: what a step is not trained on.

1. A right answer in so few turns that it may be luck is dropped, and so are episodes that ran out
   of tokens or turns, but for a few.
2. With ``balance`` a group keeps at most one more wrong and two more right episodes than it has of
   the rarer kind.
3. A group whose rewards differ by less than ``least_range`` is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax.config import NonNegativeFloat, NonNegativeInt
from agentjax.rewards.scorers import turns
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.episode_groups import generator, usable_groups
from agentjax.trajectory.record import Status, Task, Trajectory

_NO_TASK = Task(0, (), "", "")
_MORE_WRONG, _MORE_RIGHT = 1, 2


@dataclasses.dataclass(unsafe_hash=True)
class DenoiseConfig(SignalConfig):
  """Settings; the defaults are those of the released code.

  Attributes:
    part: of the reward; an episode that has 1 or more of it is right.
    least_range: of the rewards of a group, largest less smallest.
    few_turns: a right episode with so many turns or fewer is dropped.
    truncated: episodes of a group that may have run out of tokens or turns, drawn by chance.
    balance: see the module.
    seed: of the draws. Ours.
  """

  part: str = "exact_match"
  least_range: NonNegativeFloat = 0.1
  few_turns: NonNegativeInt = 1
  truncated: NonNegativeInt = 0
  balance: bool = False
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """The reward must have the part."""
    require, parts = self.requirements(path), experiment.reward.parts
    require(self.part in parts, "part", f"one of config.reward.parts = {parts}")

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
    kept: set[int] = set()
    left = 0
    for key, members in groups.items():
      chosen = self._choose(members, generator(self._config.seed, key))
      left += bool(chosen)
      kept |= {id(one) for one in chosen}
    result = [one for one in episodes if id(one) in kept]
    return result or list(episodes), {
      "denoise/kept": len(result) / max(len(episodes), 1),
      "denoise/groups": left / max(len(groups), 1),
    }

  def _choose(self, members: list[Trajectory], random: np.random.Generator) -> list[Trajectory]:
    settings = self._config
    cut = [i for i, one in enumerate(members) if one.status is Status.TRUNCATED]
    spared = set(_draw(cut, settings.truncated, random))
    usable = [
      i
      for i, one in enumerate(members)
      if (i in spared or i not in cut)
      and not (self._right(one) and turns(one, _NO_TASK) <= settings.few_turns)
    ]
    if settings.balance:
      usable = self._balanced(members, usable, random)
    rewards = [members[i].reward.value or 0.0 for i in usable]
    if not usable or max(rewards) - min(rewards) < settings.least_range:
      return []
    return [members[i] for i in usable]

  def _balanced(
    self, members: list[Trajectory], usable: list[int], random: np.random.Generator
  ) -> list[int]:
    right = [i for i in usable if self._right(members[i])]
    wrong = [i for i in usable if not self._right(members[i])]
    fewer = min(len(right), len(wrong))
    drawn = _draw(right, fewer + _MORE_RIGHT, random) + _draw(wrong, fewer + _MORE_WRONG, random)
    return sorted(drawn)

  def _right(self, episode: Trajectory) -> bool:
    part = episode.reward_parts.get(self._config.part)
    return part is not None and (part.value or 0.0) >= 1


def _draw(places: list[int], most: int, random: np.random.Generator) -> list[int]:
  """All of them, or ``most`` by chance."""
  if len(places) <= most:
    return places
  return sorted(random.choice(places, most, replace=False).tolist())
