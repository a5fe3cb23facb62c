"""The critic of sequence-level PPO: a separate network that reads only prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.config import check
from agentjax.objectives.value_loss import ValueLossConfig
from agentjax.signals.critic import Critic, CriticConfig, Reading
from agentjax.signals.signal import BatchContext, SignalTools
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import core_fields
from agentjax.trajectory.packing import PackedSequence

Array = jax.Array


@dataclasses.dataclass(unsafe_hash=True)
class PromptCriticConfig(CriticConfig):
  """A critic that reads the tokens before the policy's first token.

  ``advantage.centre`` "prompt_value" needs no more, so forward passes are over prompts only.
  """

  def check_centre(self, centre: str, path: str) -> None:
    """See ``CriticConfig.check_centre``."""
    check(
      centre == "prompt_value",
      path,
      self.chosen,
      "'episode' unless objective.advantage.centre is 'prompt_value', which asks about prompts",
    )

  def build(self, loss: ValueLossConfig, tools: SignalTools, updates: int) -> PromptCritic:
    """See ``CriticConfig.build``."""
    return PromptCritic(self, loss, tools, updates)


class PromptCritic(Critic):
  """Values of the states before the policy's first tokens; 0 on all other tokens."""

  def read(self, context: BatchContext, batch: Batch) -> PromptReading:
    short, ends = prompts(context.sequences)
    packed = self.tools.pack(short)
    here, there = (_cells(b.segment_ids, ends) for b in (packed, context.packed))
    return PromptReading(context.rows.place(packed), here, there)


@dataclasses.dataclass(frozen=True)
class PromptReading(Reading):
  """A batch of prompts, and the places of its values in the batch of the update.

  Attributes:
    here, there: int32 [2, n], row and column of the tokens with a value in ``batch`` and in the
      update's batch.
  """

  here: np.ndarray
  there: np.ndarray

  def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
    return _move(values, self.here, self.there, shape)

  def collect(self, values: Array) -> Array:
    return _move(values, self.there, self.here, self.batch.token_ids.shape)


@functools.partial(jax.jit, static_argnums=3)
def _move(values: Array, source: Array, target: Array, shape: tuple[int, ...]) -> Array:
  return jnp.zeros(shape, values.dtype).at[*target].set(values[*source])


def prompts(sequences: Sequence[PackedSequence]) -> tuple[list[PackedSequence], list[int]]:
  """Every sequence up to the first token that the policy drew, and that token's place.

  A sequence without such a token is returned whole, with its last token's place.
  """
  result, ends = [], []
  for sequence in sequences:
    drawn = np.flatnonzero(sequence.versions >= 0)
    end = int(drawn[0]) if drawn.size else len(sequence) - 1
    arrays: dict[str, Any] = {
      c.name: getattr(sequence, c.name)[: end + 1] for c in core_fields(PackedSequence, "token")
    }
    result.append(dataclasses.replace(sequence, **arrays, columns={}))
    ends.append(end)
  return result, ends


def _cells(segment_ids: Any, places: Sequence[int]) -> np.ndarray:
  """int32 [2, n], row and column of one token of each sequence, by its place in the sequence."""
  numbers = np.asarray(segment_ids)
  flat = numbers.reshape(-1)
  order = np.argsort(flat, kind="stable")  # a sequence lies in one row, so its order stays
  first = order[np.searchsorted(flat[order], np.arange(1, len(places) + 1))]
  return np.stack(np.unravel_index(first + np.asarray(places), numbers.shape)).astype(np.int32)
