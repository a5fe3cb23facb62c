"""The one update step: any objective, accumulated over micro-batches, in one jitted call.

Loss coefficients are computed once for the whole batch, so micro-batches only add up: their number
changes memory, not the gradient.
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
from agentjax.objectives.objective import LossInputs, Objective
from agentjax.training.optimizer import bad_steps
from agentjax.training.state import Networks, TrainState

Array = jax.Array


@flax.struct.dataclass
class UpdateBatch:
  """Everything one update reads, per token, all [B, T] (see trajectory.Batch for the first eight).

  ``old_log_probs``: the policy at the start of the step; ``reference_log_probs``: the KL reference;
  ``returns`` and ``old_values``: for a critic. Fields an objective does not use hold zeros.
  """

  token_ids: Array
  segment_ids: Array
  positions: Array
  turns: Array
  weights: Array
  coefficients: Array
  advantages: Array
  behaviour_log_probs: Array
  old_log_probs: Array
  reference_log_probs: Array
  old_values: Array
  returns: Array


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """Static settings of an update.

  Attributes:
    temperature: divides logits before log-probs, as in sampling.
    router_bias_rate: step of the expert bias outside the gradient; 0 leaves routers alone.
    balance_coefficient: weight of the routers' balance loss.
    has_values: whether a value head is trained.
  """

  temperature: float = 1.0
  router_bias_rate: float = 0.0
  balance_coefficient: float = 0.0
  has_values: bool = False


Update = Callable[[TrainState, UpdateBatch, Array], tuple[TrainState, dict[str, Array]]]
Score = Callable[[Any, UpdateBatch, Array], tuple[Array, Array]]


def split_rows(batch: UpdateBatch, rows: int, multiple: int = 1) -> tuple[UpdateBatch, int]:
  """[B, T] arrays as [M, rows, T] micro-batches; M is padded to a power of two times ``multiple``.

  Returns the padded micro-batches and how many of them hold tokens. Bounded shapes keep the number
  of compilations logarithmic in the batch size; the padding is never computed.
  """
  used = -(-batch.token_ids.shape[0] // rows)
  padded = multiple
  while padded < used:
    padded *= 2

  def split(x: Any) -> np.ndarray:
    x = np.asarray(x)
    out = np.zeros((padded * rows, *x.shape[1:]), x.dtype)
    out[: x.shape[0]] = x
    return out.reshape(padded, rows, *x.shape[1:])

  return jax.tree.map(split, batch), used


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
    A function whose ``micro_batches`` are [M, rows, T] arrays of which the first ``count`` are used.
    Metrics are summed over micro-batches as the objective defined them, and besides: ``loss``,
    ``grad_norm``, ``update_norm``, ``bad_steps``, ``mismatch_max`` and ``mismatch_mean``
    (|log p_trainer - log p_sampler| of weighted tokens, nats), ``router_imbalance`` (max load over
    mean load, 1 is even).
  """

  def loss_fn(networks: Networks, batch: UpdateBatch):
    scores = score_tokens(
        networks.policy, config, batch.token_ids, batch.segment_ids, batch.positions,
        temperature=settings.temperature,
    )
    inputs = LossInputs(
        log_probs=scores.log_probs,
        entropies=scores.entropies,
        values=values(networks.value, scores.hidden) if settings.has_values else None,
        old_log_probs=batch.old_log_probs,
        behaviour_log_probs=batch.behaviour_log_probs,
        reference_log_probs=batch.reference_log_probs,
        old_values=batch.old_values,
        returns=batch.returns,
        advantages=batch.advantages,
        weights=batch.weights,
        coefficients=batch.coefficients,
        segment_ids=batch.segment_ids,
        turns=batch.turns,
    )
    loss, metrics = objective(inputs)
    if settings.balance_coefficient:
      loss = loss + settings.balance_coefficient * scores.balance_loss
    counted = batch.weights > 0
    gap = jnp.where(counted, jnp.abs(scores.log_probs - batch.behaviour_log_probs), 0.0)
    sums = {**metrics, "loss": loss, "mismatch_sum": gap.sum(),
            "tokens": counted.sum().astype(jnp.float32)}
    return loss, (sums, gap.max(), scores.router_load)

  def update(state: TrainState, batches: UpdateBatch, count: Array):
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(loss_fn, state.networks, first)[1]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    no_grads = jax.tree.map(jnp.zeros_like, state.networks)

    def body(i: Array, carry):
      grads, (sums, largest, load) = carry
      batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
      new, (more, gap, more_load) = jax.grad(loss_fn, has_aux=True)(state.networks, batch)
      return (
          jax.tree.map(jnp.add, grads, new),
          (jax.tree.map(jnp.add, sums, more), jnp.maximum(largest, gap), load + more_load),
      )

    grads, (sums, largest, load) = jax.lax.fori_loop(0, count, body, (no_grads, zeros))
    changes, opt_state = optimizer.update(grads, state.opt_state, state.networks)
    networks = optax.apply_updates(state.networks, changes)
    if settings.router_bias_rate:
      moved = update_router_bias(networks.policy, load, settings.router_bias_rate)
      networks = networks.replace(policy=moved)
    tokens = jnp.maximum(sums.pop("tokens"), 1.0)
    metrics = {
        **sums,
        "mismatch_mean": sums.pop("mismatch_sum") / tokens,
        "mismatch_max": largest,
        "grad_norm": optax.global_norm(grads),
        "update_norm": optax.global_norm(changes),
        "bad_steps": bad_steps(opt_state).astype(jnp.float32),
    }
    metrics.pop("mismatch_sum", None)
    if load.size:
      metrics["router_imbalance"] = jnp.max(load.max(-1) / jnp.maximum(load.mean(-1), 1e-9))
    return state.replace(networks=networks, opt_state=opt_state), metrics

  return jax.jit(update, donate_argnums=0, out_shardings=(placed, None))


def make_score(config: ModelConfig, settings: UpdateSettings) -> Score:
  """Builds ``score(networks, micro_batches, count) -> (log_probs, values)``, both [M, rows, T].

  The forward pass of the update without its gradient: old and reference log-probs, old values.
  """

  def score(networks: Networks, batches: UpdateBatch, count: Array):
    def body(i: Array, carry):
      log_probs, old_values = carry
      batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
      scores = score_tokens(
          networks.policy, config, batch.token_ids, batch.segment_ids, batch.positions,
          temperature=settings.temperature,
      )
      log_probs = jax.lax.dynamic_update_index_in_dim(log_probs, scores.log_probs, i, 0)
      if networks.value is not None:
        new_values = values(networks.value, scores.hidden)
        old_values = jax.lax.dynamic_update_index_in_dim(old_values, new_values, i, 0)
      return log_probs, old_values

    empty = jnp.zeros(batches.token_ids.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, body, (empty, empty))

  return jax.jit(score)
