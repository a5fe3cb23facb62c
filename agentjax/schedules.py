"""Numbers that change during a run: functions of the training step, or of a metric.

A field that is annotated ``Scheduled[...]`` takes a number or a schedule, which is chosen by name::

  --config.rl.objective.policy_loss.kl_coefficient=linear
  --config.rl.objective.policy_loss.kl_coefficient.start=0.1
  --config.rl.objective.policy_loss.kl_coefficient.steps=200

Steps are those of reinforcement learning, counted from 0. No jax.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from agentjax.config import NonNegativeInt, ShareBelowOne, check, with_numbers
from agentjax.names import Choice

V = TypeVar("V")


@dataclasses.dataclass(unsafe_hash=True)
class Schedule(Choice):
  """A number that changes during a run; a schedule of your own is a class below this one.

  Attributes:
    metric: name of the metric that it reads after every step; "" where it follows the step alone.
  """

  group = "agentjax.schedules"
  adopts = "a number"
  varies = True
  metric = ""

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    names = ("linear", "cosine", "piecewise", "threshold")
    return {name: f"agentjax.schedules:{name.title()}Schedule" for name in names}

  def ends(self) -> tuple[float, ...]:
    """Numbers that all others lie between; evaluations, and all else outside training, have the
    last of them."""
    raise NotImplementedError(f"{type(self).__name__} must define ends()")

  def bounds(self) -> tuple[float, float]:
    """The lowest and the highest number."""
    return min(self.ends()), max(self.ends())

  def number(self, step: int, state: Any) -> float:
    """The number at a step.

    Args:
      step: of reinforcement learning, from 0.
      state: from ``observe``; None before the first metric, and where it reads none.
    """
    raise NotImplementedError(f"{type(self).__name__} must define number()")

  def observe(self, state: Any, value: float) -> Any:
    """JSON-able state after a step whose metric was ``value``, a finite number."""
    raise NotImplementedError(f"{type(self).__name__} reads a metric and has no observe()")


Scheduled = Annotated[V, Schedule]
"""Marks a field of numbers, ``Scheduled[PositiveFloat]``, that may hold a schedule instead."""


@dataclasses.dataclass(unsafe_hash=True)
class LinearSchedule(Schedule):
  """From one number to another in equal steps.

  Attributes:
    start: number of the first steps, up to and with step ``wait``.
    end: number from step ``wait + steps`` on.
    steps: how long it changes.
    wait: steps before it begins to change.
  """

  start: float = 0.0
  end: float = 0.0
  steps: NonNegativeInt = 0
  wait: NonNegativeInt = 0

  def validate(self, path: str = "schedule") -> None:
    super().validate(path)
    check(self.steps > 0, f"{path}.steps", self.steps, "> 0, over how many steps it changes")
    said = f"another number than {path}.start={self.start}; without a schedule it stays the same"
    check(self.start != self.end, f"{path}.end", self.end, said)

  def ends(self) -> tuple[float, ...]:
    return self.start, self.end

  def number(self, step: int, state: Any) -> float:
    share = self._share(min(max(step - self.wait, 0) / self.steps, 1.0))
    low, high = self.bounds()  # rounding may pass them
    return min(max((1 - share) * self.start + share * self.end, low), high)

  def _share(self, done: float) -> float:
    return done


@dataclasses.dataclass(unsafe_hash=True)
class CosineSchedule(LinearSchedule):
  """From one number to another along half a cosine: slow, fast, slow."""

  def _share(self, done: float) -> float:
    return (1 - math.cos(math.pi * done)) / 2


@dataclasses.dataclass(unsafe_hash=True)
class PiecewiseSchedule(Schedule):
  """One number after the other.

  Attributes:
    values: the numbers.
    at: first step of every number but the first, rising.
  """

  values: tuple[float, ...] = ()
  at: tuple[float, ...] = ()

  def validate(self, path: str = "schedule") -> None:
    super().validate(path)
    check(len(self.values) > 1, f"{path}.values", self.values, "two numbers or more")
    said = f"{len(self.values) - 1} rising numbers, where the further {path}.values begin"
    right = len(self.at) == len(self.values) - 1 and list(self.at) == sorted(set(self.at))
    check(right, f"{path}.at", self.at, said)

  def ends(self) -> tuple[float, ...]:
    return self.values

  def number(self, step: int, state: Any) -> float:
    return self.values[bisect.bisect_right(self.at, step)]


@dataclasses.dataclass(unsafe_hash=True)
class ThresholdSchedule(PiecewiseSchedule):
  """The number of the range that the moving average of a metric lies in.

  The average is ``a <- decay a + (1 - decay) value``; it begins with the first value. Before that
  the number is the first.

  Attributes:
    values: the numbers, that of the lowest range first.
    at: least average of every range but the lowest, rising.
    metric: of training steps, such as "reward/mean" or "policy/entropy"; not of evaluations, nor
      of the machine's time and memory.
    decay: weight of the past; 0 takes the latest value.
    hold: whether it never goes back to a lower range.
  """

  metric: str = ""
  decay: ShareBelowOne = 0.9
  hold: bool = False

  def validate(self, path: str = "schedule") -> None:
    super().validate(path)
    readable = self.metric and not self.metric.startswith(("eval/", "time/", "memory/"))
    said = "a metric of training steps, such as 'reward/mean', not of eval/, time/ or memory/"
    check(bool(readable), f"{path}.metric", self.metric, said)

  def number(self, step: int, state: Any) -> float:
    return self.values[0 if state is None else state["range"]]

  def observe(self, state: Any, value: float) -> Any:
    before, average = state or {"range": 0}, value
    if state is not None:
      average = self.decay * state["average"] + (1 - self.decay) * value
    place = bisect.bisect_right(self.at, average)
    return {"average": average, "range": max(place, before["range"]) if self.hold else place}


def schedules_in(settings: Any, path: str = "") -> dict[str, Schedule]:
  """The schedules of a tree of settings by dotted name; the names begin with ``path``."""
  found: dict[str, Schedule] = {}
  with_numbers(settings, found.setdefault, path)
  return found


def at_end(settings: V) -> V:
  """Settings with the last number of every schedule, as evaluations have them."""
  return with_numbers(settings, lambda _, schedule: schedule.ends()[-1])


def at_most(settings: V) -> V:
  """Settings with the highest number of every schedule, for sizes."""
  return with_numbers(settings, lambda _, schedule: schedule.bounds()[1])


def is_on(value: Any) -> bool:
  """Whether a number is, or may become, another than 0: a schedule, or an array, may."""
  return not isinstance(value, int | float) or value != 0
