"""The one update step: any objective, accumulated over micro-batches, in one jitted call.

Loss coefficients are computed once for the whole batch (objectives.prepare), so micro-batches only
add up: their number changes memory, not the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.models import (
  ModelConfig,
  TokenSets,
  forward,
  score_tokens,
  update_router_bias,
  values,
)
from agentjax.models.lora import LoraConfig
from agentjax.models.param_ops import qk_clip_scales, rescale
from agentjax.objectives.distillation import DistillationConfig
from agentjax.objectives.objective import Objective, Prepared
from agentjax.signals.teacher import TeacherHead, TeacherTargets, teacher_divergences
from agentjax.training.auxiliary import WholeBatch, auxiliary_losses, count_batch
from agentjax.training.nonfinite import count_nonfinite
from agentjax.training.optimizer import bad_steps, scale_masters
from agentjax.training.state import Network, TrainState, Weights, full_policy
from agentjax.trajectory.experts import unrecorded

Array = jax.Array


@flax.struct.dataclass
class UpdateBatch:
  """What one update reads: rows of tokens, and what ``prepare`` says of them. Arrays [B, T].

  ``experts`` are [B, T, routers, choices] as in ``Batch``; None lets the routers choose. ``depths``
  are the iterations of a looped core (``models.sample_depths``); None is its fixed depth. ``kept``
  are the places of the tokens that are scored (``score_tokens``); None scores all. ``teacher`` is
  what a teacher says of those; with ``sets`` the softmax of those runs over these tokens alone.
  """

  token_ids: Array
  positions: Array
  prepared: Prepared
  experts: Array | None = None
  depths: Array | None = None
  kept: Array | None = None
  teacher: TeacherTargets | None = None
  sets: TokenSets | None = None


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """Static settings of an update.

  Attributes:
    temperature: divides logits before log-probs, as in sampling.
    router_bias_rate: step of the expert bias outside the gradient; 0 leaves routers alone.
    balance_coefficient, sequence_balance_coefficient, router_z_coefficient, z_loss_coefficient,
      mtp_coefficient: weights of the losses of ``auxiliary_losses``.
    qk_clip: largest attention score that is left alone (``models.qk_clip_scales``); None is off.
    lora: adapters are trained, on ``TrainState.reference``.
    distillation: which divergence from ``UpdateBatch.teacher``.
    only_values: the value head is trained, and nothing of the policy changes.
  """

  temperature: float = 1.0
  router_bias_rate: float = 0.0
  balance_coefficient: float = 0.0
  sequence_balance_coefficient: float = 0.0
  router_z_coefficient: float = 0.0
  z_loss_coefficient: float = 0.0
  mtp_coefficient: float = 0.0
  qk_clip: float | None = None
  lora: LoraConfig | None = None
  distillation: DistillationConfig | None = None
  only_values: bool = False


Update = Callable[..., tuple[TrainState, dict[str, Array], Array]]
Score = Callable[[Weights, Array, Array, Array, Array | None, Array], tuple[Array, Array]]


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
  network: str = "policy",
) -> Update:
  """Builds ``update(state, micro_batches, count) -> (state, metrics, log_probs)``, state donated.

  A fourth argument is the teacher's output projection, for exact divergences.

  Args:
    config: model.
    optimizer: from ``build_optimizer``.
    objective: maps LossInputs to (summed loss, summed metrics).
    settings: see UpdateSettings.
    placed: shardings of the state.
    network: name of the one that is trained.

  Returns:
    A function whose ``micro_batches`` are [M, rows, T] arrays; the first ``count`` are used.
    Metrics are the objective's, summed over micro-batches, and ``loss``, ``grad_norm``,
    ``update_norm``, ``bad_steps``; of the weighted tokens, trainer against sampler before the
    update: ``mismatch/mean``, ``mismatch/max`` (|difference of log-probs|, nats) and
    ``mismatch/multiplicative_error`` (mean of exp |difference|); with experts ``router_imbalance``
    (largest load over mean load of a layer, the worst layer; 1 is even) and ``router_dropped``
    (choices that found no room); the ``auxiliary/...`` losses that have a coefficient; with
    ``qk_clip`` ``qk_clip/max`` (largest score of any head) and ``qk_clip/heads`` (heads clipped).
    ``nonfinite/NAME`` are those of ``count_nonfinite``.
    ``log_probs``, [M, rows, T], are the trainer's before the update.
  """
  if settings.only_values:
    settings = dataclasses.replace(settings, qk_clip=None, router_bias_rate=0.0)
  if settings.qk_clip is not None:
    config = dataclasses.replace(config, record_max_scores=True)

  def loss_fn(
    networks: Weights,
    reference: Any,
    batch: UpdateBatch,
    whole: WholeBatch,
    head: TeacherHead | None,
  ):
    fixed = batch.prepared
    if settings.only_values:
      networks = dataclasses.replace(networks, policy=jax.lax.stop_gradient(networks.policy))
    policy = full_policy(networks, reference, settings.lora)
    scores = score_tokens(
      policy,
      config,
      batch.token_ids,
      fixed.segment_ids,
      batch.positions,
      temperature=settings.temperature,
      experts=replayed(batch.experts),
      depths=batch.depths,
      kept=batch.kept,
      sets=batch.sets,
    )
    divergences = None
    if batch.teacher is not None:
      assert batch.kept is not None and settings.distillation is not None
      divergences = teacher_divergences(
        policy,
        config,
        scores.hidden,
        batch.kept,
        batch.teacher,
        head,
        settings.distillation,
        settings.temperature,
      )
    predicted = None
    if networks.value is not None:
      predicted = state_values(networks, scores.hidden)
    inputs = fixed.with_scores(scores.log_probs, scores.entropies, predicted, divergences)
    loss, metrics = objective(inputs)
    metrics = metrics | count_nonfinite(inputs, loss)
    beside = auxiliary_losses(scores, policy, config, batch, whole, settings)
    loss = loss + beside.total
    gap = jnp.abs(scores.log_probs - fixed.behaviour_log_probs)
    gap = jnp.where(fixed.weights > 0, gap, 0.0)
    sums = {
      **metrics,
      **beside.metrics,
      "loss": loss,
      "mismatch/mean": jnp.sum(fixed.shares * gap),
      "mismatch/multiplicative_error": jnp.sum(fixed.shares * jnp.exp(gap)),
    }
    if scores.routing is not None:
      sums["router_dropped"] = scores.dropped
    largest = _Largest(gap.max(), scores.max_scores)
    return loss, (_Sums(sums, beside.load), largest, scores.log_probs)

  def whole_load(state: TrainState, batches: UpdateBatch, count: Array) -> Array:
    """Tokens that the whole batch sends to each expert, by a forward pass of its own."""
    policy = full_policy(state.networks[network].weights, state.reference, settings.lora)

    def load(i: Array | int) -> Array:
      one = _take(batches, i)
      ids = (one.token_ids, one.prepared.segment_ids, one.positions)
      routing = forward(
        policy, config, *ids, experts=replayed(one.experts), depths=one.depths
      ).routing
      assert routing is not None
      return routing.load

    zeros = _filled(jax.eval_shape(load, 0), 0)
    return jax.lax.fori_loop(0, count, lambda i, total: total + load(i), zeros)

  def update(
    state: TrainState, batches: UpdateBatch, count: Array, head: TeacherHead | None = None
  ):
    tokens, sequences = count_batch(batches.prepared.segment_ids, batches.positions)
    weights, moments = state.networks[network].weights, state.networks[network].opt_state
    if weights.value is None:  # a critic of its own has learnt from them
      batches = dataclasses.replace(batches, prepared=batches.prepared.without_targets())
    load = whole_load(state, batches, count) if settings.balance_coefficient else None
    whole = WholeBatch(tokens, sequences, load)

    def step(i: Array | int):
      return jax.grad(loss_fn, has_aux=True)(
        weights, state.reference, _take(batches, i), whole, head
      )

    def body(i: Array, carry):
      grads, (sums, largest, log_probs) = carry
      more_grads, (more_sums, more_largest, scored) = step(i)
      return (
        # Gradients of narrow parameters add up in float32.
        jax.tree.map(jnp.add, grads, more_grads),
        (
          jax.tree.map(jnp.add, sums, more_sums),
          jax.tree.map(jnp.maximum, largest, more_largest),
          jax.lax.dynamic_update_index_in_dim(log_probs, scored, i, 0),
        ),
      )

    sum_shapes, largest_shapes, _ = jax.eval_shape(step, 0)[1]
    unscored = jnp.zeros(batches.token_ids.shape, jnp.float32)
    empty = (_filled(sum_shapes, 0), _filled(largest_shapes, -jnp.inf), unscored)
    no_grads = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    grads, (sums, largest, log_probs) = jax.lax.fori_loop(0, count, body, (no_grads, empty))
    changes, opt_state = optimizer.update(grads, moments, weights)
    networks = optax.apply_updates(weights, changes)
    if settings.only_values:
      networks = dataclasses.replace(networks, policy=weights.policy)
      opt_state = _keep_policy(opt_state, moments)
    healthy = bad_steps(opt_state) == 0  # a skipped update changes nothing at all
    clipping = {}
    if settings.qk_clip is not None:
      scales, clipped = qk_clip_scales(
        networks.policy, config, jnp.where(healthy, largest.scores, 0), threshold=settings.qk_clip
      )
      networks = dataclasses.replace(networks, policy=rescale(networks.policy, scales))
      untouched = jax.tree.map(lambda _: None, networks.value)
      opt_state = scale_masters(opt_state, Weights(policy=scales, value=untouched))
      clipping = {"qk_clip/max": jnp.max(largest.scores), "qk_clip/heads": clipped}
    if settings.router_bias_rate and sums.load is not None:
      rate = jnp.where(healthy, settings.router_bias_rate, 0.0)
      moved = update_router_bias(networks.policy, config, sums.load, rate)
      networks = dataclasses.replace(networks, policy=moved)
    metrics = {
      **sums.metrics,
      **clipping,
      "mismatch/max": largest.gap,
      "grad_norm": optax.tree.norm(grads),
      "update_norm": optax.tree.norm(changes),
      "bad_steps": bad_steps(opt_state).astype(jnp.float32),
    }
    if sums.load is not None:
      uneven = sums.load.max(-1) / jnp.maximum(sums.load.mean(-1), 1e-9)
      metrics["router_imbalance"] = jnp.max(uneven)
    return state.with_network(network, Network(networks, opt_state)), metrics, log_probs

  return jax.jit(update, donate_argnums=0, out_shardings=(placed, None, None))


def make_score(config: ModelConfig, temperature: float) -> Score:
  """Builds ``score(networks, token_ids, segment_ids, positions, experts, count)``.

  Arguments and results, log-probs and values, are [M, rows, T], of which the first ``count`` are
  used; ``experts`` as in ``UpdateBatch``. The forward pass of the update without its gradient:
  log-probs of the old or the reference policy, and old values (0 without a value head).
  """

  def score(
    networks: Weights,
    token_ids: Array,
    segment_ids: Array,
    positions: Array,
    experts: Array | None,
    count: Array,
  ):
    def body(i: Array, carry):
      scores = score_tokens(
        networks.policy,
        config,
        *_take((token_ids, segment_ids, positions), i),
        temperature=temperature,
        experts=replayed(_take(experts, i)),
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


def replayed(experts: Array | None) -> Array | None:
  """What ``score_tokens`` takes of recorded choices [B, T, routers, choices]; -1 is unrecorded."""
  if experts is None:
    return None
  ids = experts.astype(jnp.int32)
  return jnp.moveaxis(jnp.where(ids == unrecorded(experts.dtype), -1, ids), -2, 0)


def state_values(networks: Weights, hidden: Array) -> Array:
  """[B, T] values of the states in which each token was chosen: read off the token before it.

  The first token of a row has no state before it and gets 0; its weight is 0 as well.
  """
  return jnp.pad(values(networks.value, hidden)[:, :-1], ((0, 0), (1, 0)))


class _Sums(NamedTuple):
  """What adds up over micro-batches."""

  metrics: dict[str, Array]
  load: Array | None  # [routers, experts]


class _Largest(NamedTuple):
  """What is the largest of all micro-batches."""

  gap: Array
  scores: Array | None  # [attentions, heads]


def _keep_policy(new: Any, old: Any) -> Any:
  """``new`` optimiser state with the policy's part of ``old``."""

  def choose(path: Any, fresh: Any, kept: Any) -> Any:
    of_policy = any(getattr(key, "name", None) == "policy" for key in path)
    return kept if of_policy else fresh

  return jax.tree_util.tree_map_with_path(choose, new, old)


def _filled(shapes: Any, value: float) -> Any:
  return jax.tree.map(lambda s: jnp.full(s.shape, value, s.dtype), shapes)


def _take(tree: Any, i: Array | int) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)
