"""Supervised learning over a set of tokens at each place, instead of the whole vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from agentjax.models import ModelConfig, Params, TokenSets
from agentjax.names import Choice
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.record import Task

Compute = Callable[[Params, jax.Array, jax.Array, jax.Array], Any]
"""A jitted function of parameters, token ids, segment ids and positions [B, T]; a tree of arrays
[B, T, ...]."""


@dataclasses.dataclass(frozen=True)
class TokenSetTools:
  """What a run provides to code that chooses the sets.

  Attributes:
    model: the policy.
    tasks: all training tasks with a demonstration.
    tasks_per_step: of an optimiser step.
    first_policy: makes the policy that the run began with, also in a resumed run. Meanwhile a
      second copy of the state is in memory.
    read: ``read(compute, params, tasks)`` runs ``compute`` over the demonstrations of some tasks;
      for each array of its result, a list with the part of each task [tokens, ...].
  """

  model: ModelConfig
  tasks: Sequence[Task]
  tasks_per_step: int
  first_policy: Callable[[], Params]
  read: Callable[[Compute, Params, Sequence[Task]], list[list[np.ndarray]]]


class TokenSetSource(Protocol):
  """Knows the set of every token of a demonstration."""

  def at(self, tasks: Sequence[Task], batch: Batch, places: np.ndarray) -> TokenSets:
    """The sets of the tokens at ``places`` [B, K] of a batch of these tasks' demonstrations."""
    ...


@dataclasses.dataclass(unsafe_hash=True)
class TokenSetConfig(Choice):
  """Settings of the sets that the supervised loss runs over."""

  group = "agentjax.token_sets"

  def build(self, tools: TokenSetTools) -> TokenSetSource:
    """The sets of a run; called once, before its first supervised step."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")
