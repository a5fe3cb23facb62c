"""The numbers of a run's schedules at every step, and the states of those that read a metric."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from agentjax.config import ConfigError, with_numbers
from agentjax.schedules import Schedule, schedules_in
from agentjax.training.experiment import Experiment

C = TypeVar("C")


class ScheduledNumbers:
  """The numbers that the schedules of an experiment have at a training step.

  A schedule that reads a metric has seen the metrics of all steps before. Its states stand in the
  journal and in checkpoints, so that a step that is done again has the same numbers.

  Args:
    experiment: validated.

  Attributes:
    states: of the schedules that read a metric: by steps done, then by field.
  """

  def __init__(self, experiment: Experiment):
    self._schedules = schedules_in(experiment)
    self._first = experiment.supervised.steps + 1
    self._kept = experiment.rl.schedule.bound + 2  # groups may have begun so many steps ago
    self.states: dict[int, dict[str, Any]] = {0: {}}

  def at(self, settings: C, step: int) -> C:
    """Settings with the numbers of a training step."""
    return with_numbers(settings, lambda _, schedule: self._number(schedule, step))

  def arrays(self, settings: Any, step: int) -> dict[str, np.float32]:
    """The numbers of the schedules in ``settings`` by dotted name, as arguments of programs."""
    found = schedules_in(settings)
    return {name: np.float32(self._number(schedule, step)) for name, schedule in found.items()}

  def metrics(self, step: int) -> dict[str, float]:
    """All numbers, ``scheduled/FIELD``."""
    return {f"scheduled/{k}": float(self._number(s, step)) for k, s in self._schedules.items()}

  def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The states after a step; a metric that is missing or not finite changes none.

    Raises:
      ConfigError: the first step has no metric of that name.
    """
    states = dict(self.states[step - self._first])
    for name, schedule in self._schedules.items():
      value = metrics.get(schedule.metric, math.nan)
      if schedule.metric not in ("", *metrics) and step == self._first and "loss" in metrics:
        near = difflib.get_close_matches(schedule.metric, metrics) or sorted(metrics)
        allowed = f"a metric of training steps, such as {', '.join(near)}"
        raise ConfigError(f"config.{name}.metric={schedule.metric!r}; allowed: {allowed}.")
      if math.isfinite(value):
        states[name] = schedule.observe(states.get(name), float(value))
    return states

  def note(self, step: int, states: Mapping[str, Any]) -> None:
    """Takes the states after a step, from ``observe`` or from the journal."""
    self.states[step - self._first + 1] = dict(states)
    for old in sorted(self.states)[: -self._kept]:
      del self.states[old]

  def _number(self, schedule: Schedule, step: int) -> float:
    done, state = step - self._first, None
    if schedule.metric:
      name = next(name for name, one in self._schedules.items() if one == schedule)
      state = self.states[done].get(name)
    return schedule.number(done, state)
