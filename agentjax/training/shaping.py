"""What changes the rewards of a step's episodes before advantages are computed, chosen by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from agentjax.models import ModelConfig, Params
from agentjax.names import Choice
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import PackedSequence
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(frozen=True)
class ShapingTools:
  """What a run gives to a shaper.

  Attributes:
    model: the policy.
    token_bytes: bytes of every token, None for those that are no text.
    mesh: that of the updates.
    pack: sequences to a batch.
    rows: rows a forward pass, of which a batch is a multiple.
  """

  model: ModelConfig
  token_bytes: Sequence[bytes | None]
  mesh: jax.sharding.Mesh
  pack: Callable[[Sequence[PackedSequence]], Batch]
  rows: int


class Shaper(Protocol):
  """Shapes rewards, and may remember earlier steps. Its state is part of every checkpoint."""

  def shape(
    self, policy: Params, trajectories: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], dict[str, float]]:
    """Copies of the episodes with their rewards shaped, and metrics.

    Args:
      policy: as the step begins.
      trajectories: scored, in the order of addresses.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """JSON-able; what ``set_state`` takes."""
    ...

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes back to what ``get_state`` gave."""
    ...


@dataclasses.dataclass(unsafe_hash=True)
class ShapingConfig(Choice):
  """Settings of a shaper."""

  def check_model(self, model: ModelConfig, path: str) -> None:
    """Raises ConfigError for a model that the shaper cannot read; ``path`` names these settings."""

  def build(self, tools: ShapingTools) -> Shaper:
    """The shaper of a run."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")
