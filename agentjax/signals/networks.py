"""Helpers for signals with a network: a model that reads the policy's tokens, with a linear
head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float

from agentjax.config import check
from agentjax.models import ModelConfig, forward
from agentjax.models.heads import values
from agentjax.objectives.segments import last_of_unit, turn_units
from agentjax.sharding import split_rows
from agentjax.training.optimizer import OptimizerConfig, bad_steps, build_optimizer
from agentjax.training.state import (
  Network,
  NetworkSpec,
  Weights,
  network_shardings,
  network_specs,
)
from agentjax.trajectory.batch import Batch

Array = jax.Array


def reader_model(chosen: ModelConfig | None, policy: ModelConfig) -> ModelConfig:
  """The model of a network that reads what the policy reads.

  Args:
    chosen: its size; None is the policy's.
    policy: gives the vocabulary.
  """
  model = policy if chosen is None else chosen
  plain = dataclasses.replace(model, vocab_size=policy.vocab_size, exact_chunk=0, mtp=None)
  return plain.freeze()


def check_start(chosen: ModelConfig | None, start: str, path: str) -> None:
  """Raises ConfigError for a network of its own size that is to begin as the policy."""
  check(
    chosen is None or start == "random",
    f"{path}.start",
    start,
    f"'random' with {path}.model: a network of another size is no copy of the policy",
  )


def reader_spec(
  model: ModelConfig, optimizer: OptimizerConfig, steps: int, start: Any
) -> NetworkSpec:
  """A network with a linear head.

  Args:
    model: of ``reader_model``.
    optimizer: its own.
    steps: optimiser steps of the whole stage.
    start: see ``NetworkSpec``.
  """
  specs = network_specs(model, critic=True)
  return NetworkSpec(specs, build_optimizer(optimizer, steps, specs), start)


def map_rows(function: Callable[[Any], Array], tree: Any, rows: int) -> Array:
  """[B, ...] of a function of [rows, ...] arrays, one micro-batch at a time."""
  found = jax.lax.map(function, split_rows(tree, rows))
  return found.reshape(-1, *found.shape[2:])


def descend(
  network: Network,
  optimizer: optax.GradientTransformation,
  loss: Callable[[Weights, Any], Array],
  data: Any,
  rows: int,
) -> tuple[Network, dict[str, Array]]:
  """One optimiser step on the sum of a loss over micro-batches.

  Args:
    network: with moments.
    optimizer: of its spec.
    loss: of weights and [rows, ...] arrays.
    data: [B, ...] arrays.
    rows: of a micro-batch.

  Returns:
    The network, and ``loss``, ``grad_norm``, ``update_norm`` and ``bad_steps``.
  """

  def add(carry: tuple[Any, Array], one: Any) -> tuple[tuple[Any, Array], None]:
    value, grads = jax.value_and_grad(loss)(network.weights, one)
    return (jax.tree.map(jnp.add, carry[0], grads), carry[1] + value), None

  zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), network.weights)
  empty = (zeros, jnp.zeros((), jnp.float32))
  (grads, value), _ = jax.lax.scan(add, empty, split_rows(data, rows))
  changes, opt_state = optimizer.update(grads, network.opt_state, network.weights)
  metrics = {
    "loss": value,
    "grad_norm": optax.tree.norm(grads),
    "update_norm": optax.tree.norm(changes),
    "bad_steps": bad_steps(opt_state).astype(jnp.float32),
  }
  return Network(optax.apply_updates(network.weights, changes), opt_state), metrics


def steps_on(
  update: Callable[..., tuple[Network, dict[str, Array]]],
  spec: NetworkSpec,
  mesh: jax.sharding.Mesh,
  epochs: int,
) -> Callable[..., tuple[Network, dict[str, Array]]]:
  """Optimiser steps of a network on a batch: ``(network, *data) -> (network, metrics)``.

  Args:
    update: one step, such as ``descend``, of the same arguments and results.
    spec: of the network, with an optimiser.
    mesh: that of the updates.
    epochs: steps.

  Returns:
    A function that takes over the buffers of the network; its metrics are those of the first step.
  """
  placed = network_shardings(spec.specs, spec.optimizer, mesh)
  step = jax.jit(update, donate_argnums=0, out_shardings=(placed, None))

  def run(network: Network, *data: Any) -> tuple[Network, dict[str, Array]]:
    first: dict[str, Array] = {}
    for _ in range(epochs):
      with jax.set_mesh(mesh):
        network, metrics = step(network, *data)
      first = first or metrics
    return network, first

  return run


@jax.jit
def turn_ends(batch: Batch) -> Bool[Array, "batch time"]:
  """The last token that the policy drew in each turn."""
  drawn = (batch.versions >= 0).astype(jnp.float32)
  return last_of_unit(drawn, turn_units(batch.segment_ids, batch.turns))


TurnRows = tuple[Array, Array, Array, Array]


def turn_rows(batch: Batch) -> TurnRows:
  """What a network reads that speaks of turns: ids, sequences, positions and ``turn_ends``."""
  return batch.token_ids, batch.segment_ids, batch.positions, turn_ends(batch)


def said_of_turns(
  weights: Weights, rows: TurnRows, model: ModelConfig
) -> Float[Array, "batch time"]:
  """The head's output where a turn ends, 0 elsewhere."""
  ids, segments, positions, ends = rows
  hidden = forward(weights.policy, model, ids, segments, positions).hidden
  return jnp.where(ends, values(weights.value, hidden), 0)
