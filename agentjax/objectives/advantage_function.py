"""Advantage functions of one's own: what they are given, and what they may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import ConfigError
from agentjax.names import Adopted, Choice, check_callable
from agentjax.objectives.columns import (
  CREDIT,
  REFERENCE_LOG_PROBS,
  TOKEN_REWARDS,
  TURN_REWARDS,
)
from agentjax.objectives.custom_loss import describe, own_name, trace
from agentjax.trajectory.batch import Batch, column_or_fill, token_columns
from agentjax.trajectory.columns import ColumnError, core_fields


@flax.struct.dataclass(kw_only=True)
class AdvantageInputs:
  """What an advantage function sees: arrays [N] of sequences and [B, T] of tokens.

  A row holds several sequences. Rewards of sequences that are not valid, and floats of tokens
  without weight, are 0.

  Attributes:
    rewards: outcome of each sequence.
    valid: False for sequences that were masked and for unused places: they belong into no
      statistic.
    groups: int [N], sequences of one task have one number, 0 ... N - 1 where valid.
    weights: loss weights; 0 on prompts, observations, padding and sequences that are not valid.
    segment_ids: 0 on padding, else 1 + index of the sequence in the arrays [N].
    turns: model call that a token belongs to, from 0; -1 on padding.
    old_log_probs: of the trainer at the start of the update; the sampler's where they are trusted.
    behaviour_log_probs: of the policy that sampled.
    entropies: of the distribution that a token was drawn from, nats.
    columns: by name [B, T, ...] all others that the batch has, those of signals too; a sequence's
      value stands on all its tokens. See ``column``.
  """

  rewards: Float[Array, "sequences"]
  valid: Bool[Array, "sequences"]
  groups: Int[Array, "sequences"]
  weights: Float[Array, "batch time"]
  segment_ids: Int[Array, "batch time"]
  turns: Int[Array, "batch time"]
  old_log_probs: Float[Array, "batch time"]
  behaviour_log_probs: Float[Array, "batch time"]
  entropies: Float[Array, "batch time"]
  columns: dict[str, Array] = dataclasses.field(default_factory=dict)

  def column(self, name: str) -> Array:
    """[B, T, ...] of a registered column, its fill where the batch has none.

    Raises:
      ColumnError: one that a signal of this run would have to add, and none does.
    """
    if name not in self.columns and any(column.name == name for column in CREDIT):
      raise ColumnError(
        f"no signal of this run adds {name}; what is given: {', '.join(self.columns)}"
      )
    return column_or_fill(self.columns, name, self.weights.shape)

  @property
  def turn_rewards(self) -> Array | None:
    """What tokens are paid of the outcome for their turn, on the last token of the turn that has
    weight; None without ``advantage.turn_rewards``."""
    return self.columns.get(TURN_REWARDS.name)

  @property
  def token_rewards(self) -> Array | None:
    """Rewards of steps beside the outcome; None where no signal pays them."""
    return self.columns.get(TOKEN_REWARDS.name)

  @property
  def reference_log_probs(self) -> Array | None:
    """None unless something asks for them (``objective.with_reference``)."""
    return self.columns.get(REFERENCE_LOG_PROBS.name)


AdvantageFunction: TypeAlias = Callable[[AdvantageInputs], Array]
"""``AdvantageInputs -> advantages [B, T]``, traced by jax; no gradient flows through it."""


@dataclasses.dataclass(unsafe_hash=True)
class AdvantageChoice(Choice):
  """An advantage function of one's own with its settings: called as ``AdvantageFunction``.

  A function without settings is named by ``module:function``.
  """

  group = "agentjax.advantages"
  adopts = "a function of one argument, AdvantageInputs"

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    check_callable(found, f"{path}={name!r}", f"'module:attribute' of {cls.adopts}")
    return OwnAdvantage(name, found)  # type: ignore[return-value]

  def __call__(self, inputs: AdvantageInputs) -> Array:
    raise NotImplementedError(f"{type(self).__name__} must define __call__()")


@dataclasses.dataclass(unsafe_hash=True)
class OwnAdvantage(Adopted, AdvantageChoice):
  """A function without settings."""

  def __call__(self, inputs: AdvantageInputs) -> Array:
    return self.found(inputs)


def check_own(function: AdvantageFunction) -> None:
  """Raises ConfigError for what cannot be called with one argument."""
  check_callable(function, f"the advantage {_own_name(function)}", AdvantageChoice.adopts)


def own_advantages(
  function: AdvantageFunction, inputs: AdvantageInputs
) -> Float[Array, "batch time"]:
  """What a function says of the inputs, 0 on tokens without weight.

  Raises:
    ConfigError: it cannot be traced, or returns something else than a float array [B, T].
  """
  inside = inputs.weights > 0
  rewards = jnp.where(inputs.valid, inputs.rewards, 0)
  clean = jax.tree.map(lambda x: x if x.ndim == 1 else zero_outside(inside, x), inputs)
  inputs = dataclasses.replace(clean, rewards=rewards)
  check_advantages(function, inputs)
  return jnp.where(inside, function(inputs), 0)


def zero_outside(inside: Bool[Array, "batch time"], values: Array) -> Array:
  """A float array [B, T, ...] with 0 on tokens that are not inside; any other as it is."""
  if not jnp.issubdtype(values.dtype, jnp.inexact):
    return values
  return jnp.where(jnp.expand_dims(inside, tuple(range(2, values.ndim))), values, 0)


def check_advantages(function: AdvantageFunction, inputs: Any) -> None:
  """Traces a function without computing.

  Raises:
    ConfigError: as in ``own_advantages``.
  """
  name, shape = f"the advantage {_own_name(function)}", inputs.weights.shape
  result = trace(
    function,
    inputs,
    name,
    f"{list(shape)} arrays and {inputs.rewards.shape[0]} sequences",
    "advantage.turn_rewards, config.rl.process, signals of config.rl.signals and "
    "objective.with_reference give them",
  )
  right = isinstance(result, jax.ShapeDtypeStruct) and result.shape == shape
  if not right or not jnp.issubdtype(result.dtype, jnp.floating):
    raise ConfigError(
      f"{name} returned {describe(result)} for tokens {list(shape)} and sequences "
      f"{list(inputs.rewards.shape)}; allowed: a float array {list(shape)}, an advantage a token "
      "(objectives.broadcast_to_tokens makes one of an advantage a sequence)."
    )


def abstract_advantage_inputs(batch: Batch) -> AdvantageInputs:
  """Shapes and dtypes of what the function of a run is given, to trace it without data.

  Args:
    batch: ``abstract_batch`` with the columns that signals add.
  """
  core = {column.name: getattr(batch, column.name) for column in core_fields(AdvantageInputs)}
  columns = jax.eval_shape(token_columns, batch)
  return AdvantageInputs(**core, old_log_probs=batch.weights, columns=columns)


def _own_name(function: AdvantageFunction) -> str:
  return own_name(function.found if isinstance(function, OwnAdvantage) else function)
