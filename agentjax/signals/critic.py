"""A critic that is a network of its own: size, input, learning rate and all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.config import Config, PositiveInt, check
from agentjax.models import ModelConfig, forward
from agentjax.objectives.columns import VALUES
from agentjax.objectives.value_loss import ValueLossConfig, value_loss
from agentjax.signals.networks import descend, map_rows, reader_model, reader_spec
from agentjax.signals.signal import BatchContext, Result, Signal, SignalTools
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.rows import MeshRows
from agentjax.training.state import Network, NetworkSpec, Weights, network_shardings
from agentjax.training.update import state_values
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import core_fields
from agentjax.trajectory.packing import PackedSequence

Array = jax.Array

CRITIC = "critic"  # name of the network


@dataclasses.dataclass(unsafe_hash=True)
class CriticConfig(Config):
  """A network that predicts rewards, beside the policy; without it the critic is a head on that.

  Attributes:
    model: its size; None is the policy's. Its vocabulary is the policy's.
    input: "episode", all that the policy saw; "prompt", what stands before its first token, which
      is all that ``advantage.centre`` "prompt_value" asks about (SPPO). The second takes forward
      passes over prompts alone.
    start: "random", or "policy" for a copy of its parameters as the stage begins.
    epochs: optimiser steps a batch.
    optimizer: its own. All defaults are ours.
  """

  model: ModelConfig | None = None
  input: Literal["episode", "prompt"] = "episode"
  start: Literal["random", "policy"] = "policy"
  epochs: PositiveInt = 1
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

  def validate(self, path: str = "config.rl.critic") -> None:
    super().validate(path)
    check(
      self.model is None or self.start == "random",
      f"{path}.start",
      self.start,
      f"'random' with {path}.model: a network of another size is no copy of the policy",
    )


def critic_spec(
  config: CriticConfig | None, policy: ModelConfig, updates: int
) -> dict[str, NetworkSpec]:
  """The critic's network by its name; none without one.

  Args:
    config: of the stage.
    policy: its model.
    updates: batches of the whole stage.
  """
  if config is None or not updates:
    return {}
  model = reader_model(config.model, policy)
  return {CRITIC: reader_spec(model, config.optimizer, updates * config.epochs, config.start)}


@dataclasses.dataclass(frozen=True)
class _Places:
  """The batch that the critic reads, and where its values stand in the batch of the update.

  Attributes:
    batch: [b, t], on the mesh.
    here, there: int32 [2, n], row and column of the tokens with a value in ``batch`` and in the
      update's batch; None where the two are one.
  """

  batch: Batch
  here: np.ndarray | None = None
  there: np.ndarray | None = None

  def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
    """Values [b, t] of ``batch`` on the update's grid of ``shape``."""
    if self.here is None or self.there is None:
      return values
    return _move(values, self.here, self.there, shape)

  def collect(self, values: Array) -> Array:
    """Values [B, T] of the update's batch on the grid of ``batch``."""
    if self.here is None or self.there is None:
      return values
    return _move(values, self.there, self.here, self.batch.token_ids.shape)


@functools.partial(jax.jit, static_argnums=3)
def _move(values: Array, source: Array, target: Array, shape: tuple[int, ...]) -> Array:
  return jnp.zeros(shape, values.dtype).at[*target].set(values[*source])


class Critic(Signal):
  """Values of a network of its own, which learns from the returns of every batch.

  Args:
    config: see CriticConfig.
    loss: of the objective.
    tools: what signals are built with.
    updates: batches of the whole stage.
  """

  name = "critic"
  adds = (VALUES,)

  def __init__(self, config: CriticConfig, loss: ValueLossConfig, tools: SignalTools, updates: int):
    self._config, self._tools = config, tools
    self._model = reader_model(config.model, tools.model)
    self.networks = critic_spec(config, tools.model, updates)
    spec = self.networks[CRITIC]
    assert spec.optimizer is not None
    self._rows = MeshRows(tools.mesh, tools.rows)
    self._score = jax.jit(functools.partial(_values, model=self._model, rows=tools.rows))
    self._update = jax.jit(
      functools.partial(
        _update, model=self._model, optimizer=spec.optimizer, loss=loss, rows=tools.rows
      ),
      donate_argnums=0,
      out_shardings=(network_shardings(spec.specs, spec.optimizer, tools.mesh), None),
    )

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    places = self._read(context, batch)
    context.notes[self.name] = places
    with jax.set_mesh(self._tools.mesh):
      found = self._score(networks[CRITIC].weights, _tokens(places.batch))
    return Result({"values": places.spread(found, batch.token_ids.shape)})

  def learn(
    self, context: BatchContext, networks: Mapping[str, Any], batch: Batch, prepared: Any
  ) -> Result:
    del batch
    places, network = context.notes[self.name], networks[CRITIC]
    targets = tuple(
      places.collect(x)
      for x in (prepared.returns, prepared.value_coefficients, prepared.old_values)
    )
    first: dict[str, Any] = {}
    for _ in range(self._config.epochs):
      with jax.set_mesh(self._tools.mesh):
        network, metrics = self._update(network, _tokens(places.batch), targets)
      first = first or metrics
    return Result(
      networks={CRITIC: network}, metrics={f"critic/{name}": v for name, v in first.items()}
    )

  def _read(self, context: BatchContext, batch: Batch) -> _Places:
    if self._config.input == "episode":
      return _Places(batch)
    short, ends = prompts(context.sequences)
    packed = self._tools.pack(short)
    here, there = (_cells(b.segment_ids, ends) for b in (packed, context.packed))
    return _Places(context.rows.place(packed), here, there)


def prompts(sequences: Sequence[PackedSequence]) -> tuple[list[PackedSequence], list[int]]:
  """Every sequence up to the first token that the policy drew, and that token's place.

  A sequence that has none is given whole, and its last token's place.
  """
  result, ends = [], []
  for sequence in sequences:
    drawn = np.flatnonzero(sequence.versions >= 0)
    end = int(drawn[0]) if drawn.size else len(sequence) - 1
    arrays: dict[str, Any] = {
      c.name: getattr(sequence, c.name)[: end + 1] for c in core_fields(PackedSequence, "token")
    }
    result.append(dataclasses.replace(sequence, **arrays, columns={}, turn_rewards={}))
    ends.append(end)
  return result, ends


def _cells(segment_ids: Any, places: Sequence[int]) -> np.ndarray:
  """int32 [2, n], row and column of one token of each sequence, by its place in the sequence."""
  numbers = np.asarray(segment_ids)
  flat = numbers.reshape(-1)
  order = np.argsort(flat, kind="stable")  # a sequence lies in one row, so its order stays
  first = order[np.searchsorted(flat[order], np.arange(1, len(places) + 1))]
  return np.stack(np.unravel_index(first + np.asarray(places), numbers.shape)).astype(np.int32)


_Tokens = tuple[Array, Array, Array]


def _tokens(batch: Batch) -> _Tokens:
  return batch.token_ids, batch.segment_ids, batch.positions


def _predict(weights: Weights, tokens: _Tokens, model: ModelConfig) -> Array:
  return state_values(weights, forward(weights.policy, model, *tokens).hidden)


def _values(weights: Weights, tokens: _Tokens, model: ModelConfig, rows: int) -> Array:
  """[B, T] values, ``rows`` rows at a time."""
  return map_rows(lambda one: _predict(weights, one, model), tokens, rows)


def _update(
  network: Network,
  tokens: _Tokens,
  targets: tuple[Array, Array, Array],
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  loss: ValueLossConfig,
  rows: int,
) -> tuple[Network, dict[str, Array]]:
  """One optimiser step on returns, coefficients and old values [B, T], and metrics before it."""

  def total(weights: Weights, one: tuple[_Tokens, tuple[Array, Array, Array]]) -> Array:
    read, (returns, coefficients, old) = one
    predicted = jnp.where(coefficients > 0, _predict(weights, read, model), 0)
    return jnp.sum(coefficients * value_loss(predicted, returns, loss, old_outputs=old))

  return descend(network, optimizer, total, (tokens, targets), rows)
