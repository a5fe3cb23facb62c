"""Which of several trained policies learn at a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from agentjax.config import Config, ConfigError, PositiveInt
from agentjax.trajectory.record import POLICY


@dataclasses.dataclass(unsafe_hash=True)
class AlternateConfig(Config):
  """Trained policies learn in turns; those that wait still play, with unchanged weights.

  Attributes:
    every: steps of a turn.
    order: names of policies in the order of their turns, which then repeats; () is "policy" and
      then the others in alphabetical order. A policy that is not named never learns.
  """

  every: PositiveInt = 10
  order: tuple[str, ...] = ()

  def check_names(self, trained: Collection[str], path: str) -> None:
    """Raises ConfigError for a name that is no policy of ``trained`` or "policy"."""
    known = (POLICY, *trained)
    unknown = sorted(set(self.order) - set(known))
    if unknown or len(known) == 1:
      raise ConfigError(
        f"{path}.order={self.order}; allowed: names of trained policies, which are "
        f"{', '.join(known)} (config.seats.AGENT=trained adds one)."
      )


def learners(
  alternate: AlternateConfig | None, trained: Collection[str], number: int
) -> tuple[str, ...]:
  """Names of the policies that learn at a step.

  Args:
    alternate: whose turn it is; None lets all learn at every step.
    trained: the policies beside "policy".
    number: of the step in the stage of reinforcement learning, from 0.
  """
  every = (POLICY, *trained)
  if alternate is None:
    return every
  order = alternate.order or every
  return (order[number // alternate.every % len(order)],)
