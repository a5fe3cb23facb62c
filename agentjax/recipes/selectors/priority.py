r"""Groups of earlier steps are trained on again: those that taught most, and not long ago.

Of the kept groups ``groups`` are drawn at every step, without replacement, with chances

    (mean |R - mean R| of the group)^exponent  decay^age

where age counts training steps. A group returns with all its episodes, so that any advantage that
compares the members of a group is the one it had. A group whose rewards are all equal teaches
nothing and is not kept. Prioritised experience replay, 1511.05952, with the size of advantages in
the place of errors; all numbers are ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentjax.config import NonNegativeFloat, PositiveInt, PositiveShare
from agentjax.schedules import Scheduled
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.episode_groups import replayed, usable_groups, value_of
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import from_texts, to_texts


@dataclasses.dataclass(unsafe_hash=True)
class PriorityConfig(SignalConfig):
  """Settings of the memory and of the draw. All defaults are ours.

  Attributes:
    groups: that are trained on again at a step, beside the step's own.
    capacity: groups that are kept; those with the least priority are forgotten first.
    most_age: training steps after which a group is forgotten.
    most_times: how often a group is trained on again.
    exponent: of the mean size of the advantages; 0 draws by age alone.
    decay: factor of the priority at every step; 1 draws by advantages alone.
    seed: of the draw.
  """

  groups: Scheduled[PositiveInt] = 4
  capacity: PositiveInt = 64
  most_age: PositiveInt = 8
  most_times: PositiveInt = 1
  exponent: Scheduled[NonNegativeFloat] = 1.0
  decay: Scheduled[PositiveShare] = 0.9
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Greedy baselines of earlier steps are gone."""
    require = experiment.rl.requirements("config.rl")
    for phase in experiment.rl.all_phases:
      require(
        not phase.objective.needs_baseline,
        "objective.advantage.centre",
        f"another than 'baseline', in phases too, with {path}",
      )

  def build(self, tools: SignalTools) -> PriorityReplay:
    """See ``SignalConfig.build``."""
    del tools
    return PriorityReplay(self)


@dataclasses.dataclass
class _Kept:
  """A group of an earlier step, how much it can teach, and how often it was trained on again."""

  step: int
  size: float
  members: list[Trajectory]
  times: int = 0


class PriorityReplay(Signal):
  """See the module. What is kept is state of the run, tokens and all.

  Metrics: ``priority/kept`` and ``priority/given`` (groups), ``priority/age`` and ``priority/size``
  (means of those that are given).

  Args:
    config: see PriorityConfig.
  """

  name = "priority_replay"
  keeps_episodes = True

  def __init__(self, config: PriorityConfig):
    self._config = config
    self._kept: list[_Kept] = []

  def get_state(self) -> list[list[Any]]:
    return [[k.step, k.size, k.times, to_texts(k.members)] for k in self._kept]

  def set_state(self, state: Any) -> None:
    self._kept = [
      _Kept(int(step), float(size), from_texts(texts), int(times))
      for step, size, times, texts in state
    ]

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    settings, step = context.at(self._config), context.step
    self._kept = [k for k in self._kept if step - k.step <= settings.most_age]
    chosen = self._draw(settings, step)
    for kept in chosen:
      kept.times += 1
    given = [replayed(one) for kept in chosen for one in kept.members]
    metrics = {
      "priority/given": float(len(chosen)),
      "priority/age": float(np.mean([step - k.step for k in chosen])) if chosen else 0.0,
      "priority/size": float(np.mean([k.size for k in chosen])) if chosen else 0.0,
    }
    self._kept = [k for k in self._kept if k.times < settings.most_times]
    for members in usable_groups(episodes).values():
      values = np.array([value_of(one) for one in members], np.float64)
      if values.max() > values.min():
        size = float(np.abs(values - values.mean()).mean())
        self._kept.append(_Kept(step, size, members))
    self._kept.sort(key=lambda k: -_priority(k, settings, step))
    del self._kept[settings.capacity :]
    return [*episodes, *given], metrics | {"priority/kept": float(len(self._kept))}

  def _draw(self, settings: PriorityConfig, step: int) -> list[_Kept]:
    count = min(int(settings.groups), len(self._kept))
    if not count:
      return []
    priorities = np.array([_priority(k, settings, step) for k in self._kept])
    random = np.random.default_rng([settings.seed, step])
    found = random.choice(len(priorities), count, replace=False, p=priorities / priorities.sum())
    return [self._kept[i] for i in sorted(found)]


def _priority(kept: _Kept, settings: PriorityConfig, step: int) -> float:
  return float(kept.size**settings.exponent * settings.decay ** (step - kept.step))
