"""The one update step: any objective, accumulated over micro-batches, in one jitted call.

Loss coefficients are computed once for the whole batch (objectives.prepare), so micro-batches only
add up: their number changes memory, not the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.models import ModelConfig, score_tokens, update_router_bias, values
from agentjax.objectives.objective import Objective, Prepared
from agentjax.training.optimizer import bad_steps
from agentjax.training.state import Networks, TrainState

Array = jax.Array


@flax.struct.dataclass
class UpdateBatch:
  """What one update reads: rows of tokens, and what ``prepare`` says of them. Arrays [B, T]."""

  token_ids: Array
  positions: Array
  prepared: Prepared


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """Static settings of an update.

  Attributes:
    temperature: divides logits before log-probs, as in sampling.
    router_bias_rate: step of the expert bias outside the gradient; 0 leaves routers alone.
    balance_coefficient: weight of the routers' balance loss.
  """

  temperature: float = 1.0
  router_bias_rate: float = 0.0
  balance_coefficient: float = 0.0


Update = Callable[[TrainState, UpdateBatch, int], tuple[TrainState, dict[str, Array]]]
Score = Callable[[Networks, Array, Array, Array, int], tuple[Array, Array]]


def micro_rows(needed: int, rows: int) -> int:
  """Rows to pack into: ``rows`` times the least power of four that holds ``needed`` rows.

  Few shapes are ever compiled, and micro-batches without tokens are never computed.
  """
  count = 1
  while count * rows < needed:
    count *= 4
  return count * rows


def split_rows(tree: Any, rows: int) -> Any:
  """[M * rows, ...] arrays as [M, rows, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), tree)


def used_micro_batches(segment_ids: Any, rows: int) -> int:
  """How many leading micro-batches of [B, T] rows hold tokens."""
  occupied = np.flatnonzero(np.asarray(segment_ids).any(axis=1))
  return int(occupied[-1]) // rows + 1 if occupied.size else 0


def make_update(
  config: ModelConfig,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  settings: UpdateSettings,
  placed: TrainState,
) -> Update:
  """Builds ``update(state, micro_batches, count) -> (state, metrics)``, jitted, state donated.

  Args:
    config: model.
    optimizer: from ``build_optimizer``.
    objective: maps LossInputs to (summed loss, summed metrics).
    settings: see UpdateSettings.
    placed: shardings of the state.

  Returns:
    A function whose ``micro_batches`` are [M, rows, T] arrays; the first ``count`` are used.
    Metrics are the objective's, summed over micro-batches, and ``loss``, ``grad_norm``,
    ``update_norm``, ``bad_steps``; of the weighted tokens, trainer against sampler before the
    update: ``mismatch/mean``, ``mismatch/max`` (|difference of log-probs|, nats) and
    ``mismatch/multiplicative_error`` (mean of exp |difference|); with experts ``router_imbalance``
    (largest load over mean load of a layer, the worst layer; 1 is even).
  """

  def loss_fn(networks: Networks, batch: UpdateBatch, count: Array):
    fixed = batch.prepared
    scores = score_tokens(
      networks.policy,
      config,
      batch.token_ids,
      fixed.segment_ids,
      batch.positions,
      temperature=settings.temperature,
    )
    predicted = None
    if networks.value is not None:
      predicted = state_values(networks, scores.hidden)
    loss, metrics = objective(fixed.with_scores(scores.log_probs, scores.entropies, predicted))
    if settings.balance_coefficient:
      loss = loss + settings.balance_coefficient / count * scores.balance_loss
    gap = jnp.abs(scores.log_probs - fixed.behaviour_log_probs)
    gap = jnp.where(fixed.weights > 0, gap, 0.0)
    sums = {
      **metrics,
      "loss": loss,
      "mismatch/mean": jnp.sum(fixed.shares * gap),
      "mismatch/multiplicative_error": jnp.sum(fixed.shares * jnp.exp(gap)),
    }
    routing = scores.routing
    return loss, (sums, gap.max(), None if routing is None else routing.load)

  def update(state: TrainState, batches: UpdateBatch, count: Array):
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(loss_fn, state.networks, first, count)[1]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    no_grads = jax.tree.map(jnp.zeros_like, state.networks)

    def body(i: Array, carry):
      grads, (sums, largest, load) = carry
      new, (more, gap, more_load) = jax.grad(loss_fn, has_aux=True)(
        state.networks, _take(batches, i), count
      )
      return (
        jax.tree.map(jnp.add, grads, new),
        (
          jax.tree.map(jnp.add, sums, more),
          jnp.maximum(largest, gap),
          jax.tree.map(jnp.add, load, more_load),
        ),
      )

    grads, (sums, largest, load) = jax.lax.fori_loop(0, count, body, (no_grads, zeros))
    changes, opt_state = optimizer.update(grads, state.opt_state, state.networks)
    networks = optax.apply_updates(state.networks, changes)
    if settings.router_bias_rate and load is not None:
      # A skipped update changes nothing at all.
      rate = jnp.where(bad_steps(opt_state) == 0, settings.router_bias_rate, 0.0)
      moved = update_router_bias(networks.policy, load, rate)
      networks = dataclasses.replace(networks, policy=moved)
    metrics = {
      **sums,
      "mismatch/max": largest,
      "grad_norm": optax.tree.norm(grads),
      "update_norm": optax.tree.norm(changes),
      "bad_steps": bad_steps(opt_state).astype(jnp.float32),
    }
    if load is not None:
      metrics["router_imbalance"] = jnp.max(load.max(-1) / jnp.maximum(load.mean(-1), 1e-9))
    return dataclasses.replace(state, networks=networks, opt_state=opt_state), metrics

  return jax.jit(update, donate_argnums=0, out_shardings=(placed, None))


def make_score(config: ModelConfig, settings: UpdateSettings) -> Score:
  """Builds ``score(networks, token_ids, segment_ids, positions, count) -> (log_probs, values)``.

  Arguments and results are [M, rows, T], of which the first ``count`` are used. The forward pass of
  the update without its gradient: log-probs of the old or the reference policy, and old values (0
  without a value head).
  """

  def score(
    networks: Networks, token_ids: Array, segment_ids: Array, positions: Array, count: Array
  ):
    def body(i: Array, carry):
      scores = score_tokens(
        networks.policy,
        config,
        *_take((token_ids, segment_ids, positions), i),
        temperature=settings.temperature,
      )
      results = [scores.log_probs, jnp.zeros_like(scores.log_probs)]
      if networks.value is not None:
        results[1] = state_values(networks, scores.hidden)
      return tuple(
        jax.lax.dynamic_update_index_in_dim(old, new, i, 0)
        for old, new in zip(carry, results, strict=True)
      )

    empty = jnp.zeros(token_ids.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, body, (empty, empty))

  return jax.jit(score)


def state_values(networks: Networks, hidden: Array) -> Array:
  """[B, T] values of the states in which each token was chosen: read off the token before it.

  The first token of a row has no state before it and gets 0; its weight is 0 as well.
  """
  return jnp.pad(values(networks.value, hidden)[:, :-1], ((0, 0), (1, 0)))


def _take(tree: Any, i: Array) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)
