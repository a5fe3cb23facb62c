"""A critic that is a separate network with its own size, input and learning rate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from agentjax.config import PositiveInt
from agentjax.models import ModelConfig, forward
from agentjax.names import Choice
from agentjax.objectives.columns import VALUES
from agentjax.objectives.value_loss import ValueLossConfig, value_loss
from agentjax.signals.networks import (
  check_start,
  descend,
  map_rows,
  reader_model,
  reader_spec,
  steps_on,
)
from agentjax.signals.signal import BatchContext, Result, Signal, SignalTools
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.rows import MeshRows
from agentjax.training.state import Network, NetworkSpec, Weights
from agentjax.training.update import state_values
from agentjax.trajectory.batch import Batch

Array = jax.Array

CRITIC = "critic"  # name of the network


@dataclasses.dataclass(unsafe_hash=True)
class CriticConfig(Choice):
  """A separate network that predicts rewards; without it the critic is a head on the policy.

  This one reads everything that the policy saw. Other choices are subclasses, such as one that
  reads only prompts (``agentjax.recipes.sppo``).

  Attributes:
    model: its size; None is the policy's. Its vocabulary is the policy's.
    start: "random", or "policy" for a copy of its parameters as the stage begins.
    epochs: optimiser steps a batch.
    optimizer: its own. All defaults are ours.
  """

  group = "agentjax.critics"

  model: ModelConfig | None = None
  start: Literal["random", "policy"] = "policy"
  epochs: PositiveInt = 1
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "episode": "agentjax.signals.critic:CriticConfig",
      "prompt": "agentjax.recipes.sppo:PromptCriticConfig",
    }

  def check_centre(self, centre: str, path: str) -> None:
    """Raises ConfigError for an ``advantage.centre`` that needs other values than the critic
    gives."""

  def build(self, loss: ValueLossConfig, tools: SignalTools, updates: int) -> Critic:
    """The critic of a run; arguments as ``Critic`` has them."""
    return Critic(self, loss, tools, updates)

  def validate(self, path: str = "config.rl.critic") -> None:
    super().validate(path)
    check_start(self.model, self.start, path)


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
class Reading:
  """The rows that a critic reads, here the batch of the update itself.

  Attributes:
    batch: [b, t], on the mesh.
  """

  batch: Batch

  def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
    """Values [b, t] of ``batch`` on the update's grid of ``shape``."""
    del shape
    return values

  def collect(self, values: Array) -> Array:
    """Values [B, T] of the update's batch on the grid of ``batch``."""
    return values


class Critic(Signal):
  """Values from a separate network, which learns from the returns of every batch.

  Args:
    config: see CriticConfig.
    loss: of the objective.
    tools: what signals are built with.
    updates: batches of the whole stage.
  """

  name = "critic"
  adds = (VALUES,)

  def __init__(self, config: CriticConfig, loss: ValueLossConfig, tools: SignalTools, updates: int):
    self._config, self.tools = config, tools
    self._model = reader_model(config.model, tools.model)
    self.networks = critic_spec(config, tools.model, updates)
    spec = self.networks[CRITIC]
    assert spec.optimizer is not None
    self._rows = MeshRows(tools.mesh, tools.rows)
    self._score = jax.jit(functools.partial(_values, model=self._model, rows=tools.rows))
    update = functools.partial(
      _update, model=self._model, optimizer=spec.optimizer, loss=loss, rows=tools.rows
    )
    self._learn = steps_on(update, spec, tools.mesh, config.epochs)

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    reading = self.read(context, batch)
    context.notes[self.name] = reading
    with jax.set_mesh(self.tools.mesh):
      found = self._score(networks[CRITIC].weights, _tokens(reading.batch))
    return Result({"values": reading.spread(found, batch.token_ids.shape)})

  def learn(
    self, context: BatchContext, networks: Mapping[str, Any], batch: Batch, prepared: Any
  ) -> Result:
    del batch
    reading, network = context.notes[self.name], networks[CRITIC]
    targets = tuple(
      reading.collect(x)
      for x in (prepared.returns, prepared.value_coefficients, prepared.old_values)
    )
    network, metrics = self._learn(network, _tokens(reading.batch), targets)
    return Result(
      networks={CRITIC: network}, metrics={f"critic/{name}": v for name, v in metrics.items()}
    )

  def read(self, context: BatchContext, batch: Batch) -> Reading:
    """What it reads of a batch; ``batch`` is on the mesh."""
    del context
    return Reading(batch)


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
