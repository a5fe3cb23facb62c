"""Helpers for signals with a network: a model that reads the policy's tokens, with a linear
head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agentjax.config import check
from agentjax.models import ModelConfig
from agentjax.sharding import split_rows
from agentjax.training.optimizer import OptimizerConfig, bad_steps, build_optimizer
from agentjax.training.state import Network, NetworkSpec, Weights, network_specs

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
