"""Settings of methods that make several updates per batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax

from agentjax.names import Choice
from agentjax.objectives.objective import ObjectiveConfig, Prepared
from agentjax.signals.signal import Signal
from agentjax.trajectory.batch import Batch

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment, PhaseConfig

Prepare = Callable[[Batch], tuple[Prepared, dict[str, jax.Array]]]


class PlannedPass(NamedTuple):
  """One update of every batch in every epoch; later passes skip batches without weighted tokens.

  Attributes:
    prefix: of its metrics; "" for the first pass.
    prepare: from a batch with the columns of all signals to the inputs of the loss, and metrics; it
      is compiled.
    objective: whose loss is taken.
  """

  prefix: str
  prepare: Prepare
  objective: ObjectiveConfig


@dataclasses.dataclass(unsafe_hash=True)
class PassesConfig(Choice):
  """Settings of a method that trains on a batch in several passes.

  Attributes:
    number: of passes; each runs all minibatches and epochs before the next begins.
  """

  group: ClassVar[str] = "agentjax.passes"
  number: ClassVar[int] = 1

  def check_phase(self, experiment: Experiment, phase: PhaseConfig, path: str, name: str) -> None:
    """Raises ConfigError if a phase cannot be combined with these passes.

    Args:
      experiment: all settings.
      phase: that has these passes.
      path: dotted name of the experiment.
      name: dotted name of the phase, which has the fields ``objective`` and ``passes``.
    """

  def signals(self, experiment: Experiment) -> tuple[Signal, ...]:
    """The signals that these passes need."""
    del experiment
    return ()

  def plan(self, objective: ObjectiveConfig) -> tuple[PlannedPass, ...]:
    """The passes, as many as ``number``; the schedules of ``objective`` are numbers, traced ones
    where a pass is compiled."""
    raise NotImplementedError(f"{type(self).__name__} must define plan()")
