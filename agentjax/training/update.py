"""The one update step: any objective, accumulated over micro-batches, in one jitted call.

Loss coefficients are computed once for the whole batch (objectives.prepare), so micro-batches only
add up: their number changes memory, not the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.models import (
  ModelConfig,
  TokenScores,
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
from agentjax.training.auxiliary import AuxiliaryConfig, WholeBatch, auxiliary_losses, count_batch
from agentjax.training.likelihood import ScoreTokens
from agentjax.training.nonfinite import count_nonfinite
from agentjax.training.optimizer import bad_steps, scale_masters
from agentjax.training.state import Network, TrainState, Weights, full_policy
from agentjax.trajectory.experts import unrecorded

Array = jax.Array


@flax.struct.dataclass
class UpdateBatch:
  """What one update reads: rows of tokens, and what ``prepare`` says of them. Arrays [B, T].

  ``experts`` are [B, T, routers, choices] as in ``Batch``; None lets the routers choose. ``drawn``
  is what sequences draw where blocks run more than once (``models.PassKind``), or None. ``kept``
  are the places of the tokens that are scored (``score_tokens``); None scores all. ``teacher`` is
  what a teacher says of those; with ``sets`` the softmax of those runs over these tokens alone.
  ``marks`` is what ``UpdateSettings.score`` takes.
  """

  token_ids: Array
  positions: Array
  prepared: Prepared
  experts: Array | None = None
  drawn: Any = None
  kept: Array | None = None
  teacher: TeacherTargets | None = None
  sets: TokenSets | None = None
  marks: Array | None = None


@dataclasses.dataclass(unsafe_hash=True)
class UpdateSettings(AuxiliaryConfig):
  """Static settings of an update.

  Attributes:
    temperature: divides logits before log-probs, as in sampling.
    lora: adapters are trained, on ``TrainState.reference``.
    distillation: which divergence from ``UpdateBatch.teacher``.
    only_values: the value head is trained, and nothing of the policy changes.
    score: scores tokens (``LikelihoodConfig``); None is ``score_tokens``.
  """

  temperature: float = 1.0
  lora: LoraConfig | None = None
  distillation: DistillationConfig | None = None
  only_values: bool = False
  score: ScoreTokens | None = None


Update = Callable[..., tuple[TrainState, dict[str, Array], Array]]
Score = Callable[..., tuple[Array, Array]]


def micro_rows(needed: int, rows: int) -> int:
  """Rows to pack into: ``rows`` times the least power of four that holds ``needed`` rows.

  Few shapes are ever compiled, and micro-batches without tokens are never computed.
  """
  count = 1
  while count * rows < needed:
    count *= 4
  return count * rows


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

  A fourth argument is the teacher's output projection, for exact divergences; a fifth holds the
  numbers of the objective's schedules (``ObjectiveConfig.at``).

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
    ``update_norm``, ``bad_steps``; with experts ``router_imbalance`` (largest load over mean load
    of a layer, the worst layer; 1 is even) and ``router_dropped`` (choices that found no room); the
    ``auxiliary/...`` losses that have a coefficient; with ``qk_clip`` ``qk_clip/max`` (largest
    score of any head) and ``qk_clip/heads`` (heads clipped). ``nonfinite/NAME`` are those of
    ``count_nonfinite``.
    ``log_probs``, [M, rows, T], are the trainer's before the update.
  """
  if settings.only_values:
    settings = dataclasses.replace(settings, qk_clip=None, router_bias_rate=0.0)
  if settings.qk_clip is not None:
    config = dataclasses.replace(config, record_max_scores=True)
  parts = _UpdateParts(config, objective, settings)

  def update(
    state: TrainState,
    batches: UpdateBatch,
    count: Array,
    head: TeacherHead | None = None,
    numbers: Mapping[str, Array] | None = None,
  ):
    old, reference = state.networks[network], state.reference
    if old.weights.value is None:  # a critic of its own has learnt from them
      batches = dataclasses.replace(batches, prepared=batches.prepared.without_targets())
    grads, gathered = parts.gradients(old.weights, reference, batches, count, head, numbers)
    changes, opt_state = optimizer.update(grads, old.opt_state, old.weights)
    new = Network(optax.apply_updates(old.weights, changes), opt_state)
    if settings.only_values:
      kept = _keep_policy(opt_state, old.opt_state)
      new = Network(dataclasses.replace(new.weights, policy=old.weights.policy), kept)
    bad = bad_steps(new.opt_state)
    new, clipping = parts.clip_attention(new, gathered.max_scores, bad == 0)
    new = parts.move_router_bias(new, gathered.sums.load, bad == 0)
    metrics = {
      **gathered.sums.metrics,
      **clipping,
      "grad_norm": optax.tree.norm(grads),
      "update_norm": optax.tree.norm(changes),
      "bad_steps": bad.astype(jnp.float32),
    }
    load = gathered.sums.load
    if load is not None:
      metrics["router_imbalance"] = jnp.max(load.max(-1) / jnp.maximum(load.mean(-1), 1e-9))
    return state.with_network(network, new), metrics, gathered.log_probs

  return jax.jit(update, donate_argnums=0, out_shardings=(placed, None, None))


class _Sums(NamedTuple):
  """What adds up over micro-batches."""

  metrics: dict[str, Array]
  load: Array | None  # [routers, experts]


class _Gathered(NamedTuple):
  """What the loss of a micro-batch, or of all, gives besides its gradient."""

  sums: _Sums
  max_scores: Array | None  # [attentions, heads], the largest of all micro-batches
  log_probs: Array  # of the micro-batch [rows, T], or of all [M, rows, T]


@dataclasses.dataclass(frozen=True)
class _UpdateParts:
  """The parts of an update, traced one after the other; arguments are those of ``make_update``."""

  config: ModelConfig
  objective: Objective
  settings: UpdateSettings

  def gradients(
    self,
    weights: Weights,
    reference: Any,
    batches: UpdateBatch,
    count: Array,
    head: TeacherHead | None,
    numbers: Mapping[str, Array] | None,
  ) -> tuple[Any, _Gathered]:
    """The gradient of the whole batch in float32, summed over ``count`` micro-batches."""
    tokens, sequences = count_batch(batches.prepared.segment_ids, batches.positions)
    load = None
    if self.settings.balance_coefficient:
      load = self._whole_load(weights, reference, batches, count)
    whole = WholeBatch(tokens, sequences, load)

    def step(i: Array | int) -> tuple[Any, _Gathered]:
      gradient = jax.grad(self._loss, has_aux=True)
      return gradient(weights, reference, _take(batches, i), whole, head, numbers)

    def body(i: Array, carry: tuple[Any, _Gathered]) -> tuple[Any, _Gathered]:
      grads, (sums, max_scores, log_probs) = carry
      more_grads, (more_sums, more_scores, scored) = step(i)
      return (
        # Gradients of narrow parameters add up in float32.
        jax.tree.map(jnp.add, grads, more_grads),
        _Gathered(
          jax.tree.map(jnp.add, sums, more_sums),
          jax.tree.map(jnp.maximum, max_scores, more_scores),
          jax.lax.dynamic_update_index_in_dim(log_probs, scored, i, 0),
        ),
      )

    sum_shapes, score_shapes, _ = jax.eval_shape(step, 0)[1]
    unscored = jnp.zeros(batches.token_ids.shape, jnp.float32)
    empty = _Gathered(_filled(sum_shapes, 0), _filled(score_shapes, -jnp.inf), unscored)
    no_grads = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    return jax.lax.fori_loop(0, count, body, (no_grads, empty))

  def _loss(
    self,
    networks: Weights,
    reference: Any,
    batch: UpdateBatch,
    whole: WholeBatch,
    head: TeacherHead | None,
    numbers: Mapping[str, Array] | None,
  ) -> tuple[Array, _Gathered]:
    """The loss of one micro-batch."""
    fixed, settings = batch.prepared, self.settings
    if settings.only_values:
      networks = dataclasses.replace(networks, policy=jax.lax.stop_gradient(networks.policy))
    policy = full_policy(networks, reference, settings.lora)
    given: dict[str, Any] = {"marks": batch.marks}
    if settings.score is None:
      given = {name: getattr(batch, name) for name in ("drawn", "kept", "sets")}
      given["experts"] = replayed(batch.experts)
    scores = (settings.score or score_tokens)(
      policy,
      self.config,
      batch.token_ids,
      fixed.segment_ids,
      batch.positions,
      temperature=settings.temperature,
      **given,
    )
    divergences, of_candidates = self._divergences(policy, scores, batch, head)
    predicted = None
    if networks.value is not None:
      predicted = state_values(networks, scores.hidden)
    inputs = fixed.with_scores(scores.log_probs, scores.entropies, predicted, divergences, numbers)
    loss, metrics = self.objective(inputs)
    metrics = metrics | {k: jnp.sum(fixed.shares * v) for k, v in of_candidates.items()}
    metrics |= count_nonfinite(inputs, loss)
    beside = auxiliary_losses(scores, policy, self.config, batch, whole, settings)
    loss = loss + beside.total
    sums = {**metrics, **beside.metrics, "loss": loss}
    if scores.routing is not None:
      sums["router_dropped"] = scores.dropped
    return loss, _Gathered(_Sums(sums, beside.load), scores.max_scores, scores.log_probs)

  def _divergences(
    self, policy: Any, scores: TokenScores, batch: UpdateBatch, head: TeacherHead | None
  ) -> tuple[Array | None, dict[str, Array]]:
    """[B, T] from the batch's teacher, None without one; and metrics [B, T]."""
    if batch.teacher is None:
      return None, {}
    distillation = self.settings.distillation
    assert batch.kept is not None and distillation is not None
    return teacher_divergences(
      policy,
      self.config,
      scores.hidden,
      batch.kept,
      batch.teacher,
      head,
      distillation,
      self.settings.temperature,
    )

  def _whole_load(
    self, weights: Weights, reference: Any, batches: UpdateBatch, count: Array
  ) -> Array:
    """Tokens that the whole batch sends to each expert, by a forward pass of its own."""
    policy = full_policy(weights, reference, self.settings.lora)

    def load(i: Array | int) -> Array:
      one = _take(batches, i)
      ids = (one.token_ids, one.prepared.segment_ids, one.positions)
      routing = forward(
        policy, self.config, *ids, experts=replayed(one.experts), drawn=one.drawn
      ).routing
      assert routing is not None
      return routing.load

    zeros = _filled(jax.eval_shape(load, 0), 0)
    return jax.lax.fori_loop(0, count, lambda i, total: total + load(i), zeros)

  def clip_attention(
    self, network: Network, scores: Array | None, healthy: Array
  ) -> tuple[Network, dict[str, Array]]:
    """Scales queries and keys of heads whose largest score is above ``qk_clip``; and metrics."""
    if self.settings.qk_clip is None:
      return network, {}
    assert scores is not None  # the forward pass records them
    weights = network.weights
    scales, clipped = qk_clip_scales(
      weights.policy, self.config, jnp.where(healthy, scores, 0), threshold=self.settings.qk_clip
    )
    untouched = jax.tree.map(lambda _: None, weights.value)
    opt_state = scale_masters(network.opt_state, Weights(policy=scales, value=untouched))
    weights = dataclasses.replace(weights, policy=rescale(weights.policy, scales))
    metrics = {"qk_clip/max": jnp.max(scores), "qk_clip/heads": clipped}
    return Network(weights, opt_state), metrics

  def move_router_bias(self, network: Network, load: Array | None, healthy: Array) -> Network:
    """Moves the bias of the routers against the load; not after a skipped update."""
    if not self.settings.router_bias_rate or load is None:
      return network
    rate = jnp.where(healthy, self.settings.router_bias_rate, 0.0)
    moved = update_router_bias(network.weights.policy, self.config, load, rate)
    return Network(dataclasses.replace(network.weights, policy=moved), network.opt_state)


def make_score(config: ModelConfig, temperature: float, own: ScoreTokens | None = None) -> Score:
  """Builds ``score(networks, token_ids, segment_ids, positions, experts, count)``.

  Arguments and results, log-probs and values, are [M, rows, T], of which the first ``count`` are
  used; ``experts`` as in ``UpdateBatch``. The forward pass of the update without its gradient:
  log-probs of the old or the reference policy, and old values (0 without a value head). With
  ``own``, as ``UpdateSettings.score``, a seventh argument is its marks.
  """

  def score(
    networks: Weights,
    token_ids: Array,
    segment_ids: Array,
    positions: Array,
    experts: Array | None,
    count: Array,
    marks: Array | None = None,
  ):
    def body(i: Array, carry):
      given = {"marks": _take(marks, i)} if own else {"experts": replayed(_take(experts, i))}
      scores = (own or score_tokens)(
        networks.policy,
        config,
        *_take((token_ids, segment_ids, positions), i),
        temperature=temperature,
        **given,
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
