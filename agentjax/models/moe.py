"""Mixture of experts: a router, routed experts behind an optional latent, a shared expert."""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.expert_parallel import sharded_sum
from agentjax.models.experts import Experts, of_tokens, weighted_sum
from agentjax.models.linear import linear
from agentjax.models.matrices import matrix_spec
from agentjax.models.mlp import Mlp, mlp, mlp_spec
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array


@flax.struct.dataclass
class Moe:
  """Weights. E routed and Z zero experts; ``in`` is the latent's width, embed without one.

  None: ``expert_gate`` for squared ReLU, ``latent_*`` without a latent, ``expert_scale`` unless the
  config wants it, ``shared`` without a shared expert.
  """

  router: Weight  # [embed, E + Z] float32
  router_bias: Weight  # [E + Z] float32; moves the choice only, and only ``update_router_bias``
  expert_up: Weight  # [E, in, expert_mlp]
  expert_gate: Weight | None  # [E, in, expert_mlp]
  expert_down: Weight  # [E, expert_mlp, in]
  latent_down: Weight | None  # [embed, in]
  latent_up: Weight | None  # [in, embed]
  expert_scale: Weight | None  # [E + Z] float32
  shared: Mlp | None


@flax.struct.dataclass
class Routing:
  """What one block routed. Only tokens that are not padding count in sums and means.

  Attributes:
    experts: int32 [..., choices], ids of the experts of each token, padding too; zero experts
      follow the routed ones.
    load: float32 [E + Z], tokens sent to each expert. Adds up over micro-batches.
    dropped: float32 scalar, choices that were dropped for lack of room (see ``expert_parallel``).
      Adds up over micro-batches.
    balance_loss: float32 scalar ``(E + Z) sum_e f_e p_e``: f_e the share of the choices that fell
      on e, p_e the mean of its score among all scores of a token; 1 at balance. Gradients reach p
      only.
    mean_scores: float32 [E + Z], these p; with the load of a whole batch they give the loss of the
      whole batch from parts of it.
    sequence_balance_loss: float32 scalar, the same within each sequence, mean over sequences
      (2412.19437).
    router_z_loss: float32 scalar, mean of ``logsumexp(logits)²`` (2202.08906).
  """

  experts: Array
  load: Array
  dropped: Array
  balance_loss: Array
  mean_scores: Array
  sequence_balance_loss: Array
  router_z_loss: Array


class _Routes(NamedTuple):
  logits: Array  # float32 [..., E + Z]
  scores: Array  # float32 [..., E + Z]
  experts: Array  # int32 [..., choices]
  gates: Array  # float32 [..., choices]


def moe_spec(config: ModelConfig) -> Moe:
  """Abstract parameters of one mixture block."""
  experts, width = config.num_experts, config.d_expert
  latent, inner = config.latent_size, config.latent_size or config.d_model
  axis = "latent" if latent else "embed"
  routed = experts + config.zero_experts
  into = matrix_spec(config, (experts, inner, width), ("experts", axis, "expert_mlp"))

  def between(size: int, of: str | None, to: int, name: str | None) -> ParamSpec | None:
    return matrix_spec(config, (size, to), (of, name)) if latent else None

  return Moe(
    router=ParamSpec(
      (config.d_model, routed),
      ("embed", None),
      scale=config.init_scale * config.d_model**-0.5,
      trained=not config.frozen_router,
      wide=True,
    ),
    router_bias=ParamSpec(
      (routed,), (None,), init="zeros", trained=False, decayed=False, wide=True
    ),
    expert_up=into,
    expert_gate=into if config.mlp_activation != "relu2" else None,
    expert_down=matrix_spec(config, (experts, width, inner), ("experts", "expert_mlp", axis)),
    latent_down=between(config.d_model, "embed", latent, None),
    latent_up=between(latent, None, config.d_model, "embed"),
    expert_scale=ParamSpec((routed,), (None,), init="ones", decayed=False, wide=True)
    if config.expert_scale
    else None,
    shared=mlp_spec(config, config.d_shared_expert) if config.d_shared_expert else None,
  )


def moe(
  params: Moe,
  x: Float[Array, "*lead embed"],
  config: ModelConfig,
  *,
  segment_ids: Int[Array, "*lead"],
  experts: Int[Array, "*lead choices"] | None = None,
  router_input: Float[Array, "*lead embed"] | None = None,
) -> tuple[Float[Array, "*lead embed"], Routing]:
  """``routed_scaling * up(sum_{e in top k} g_e f_e(down x)) + shared(x)``.

  Scores are the sigmoid or the softmax of ``router x``, in float32; the k experts with the largest
  ``score + bias`` are chosen, among the best groups of experts where there are groups; gates g are
  their scores, divided by their sum where ``norm_topk``. f of a zero expert is the identity. The
  projections down to and up from the latent are left out without a ``latent_size``.

  On one device a token's result depends on no other token: there is no capacity to overflow. Over
  several devices the same holds unless ``config.expert_capacity`` is set.

  Args:
    x: any leading axes, the last of them time; under a mesh [B, T], or [B] for one token each.
    segment_ids: the sequence of each token, one run each; 0 at padding, which visits no routed
      expert and is left out of the statistics.
    experts: ids that replace the k largest, as recorded in sampling (router replay, 2510.11370);
      gates and losses are still those of x. For an id of -1 the router chooses.
    router_input: input of the router, instead of x.

  References: DeepSeek-V3, 2412.19437 (sigmoid scores, groups); Wang et al., 2408.15664 (the bias);
  Nemotron 3, 2512.20856 (the latent); LongCat-Flash, 2509.01322 (zero experts).
  """
  routes = _route(params, x if router_input is None else router_input, config, experts)
  routed = (segment_ids != 0)[..., None] & (routes.experts < config.num_experts)
  # In sampling the arrays may be padded with experts to which no token is sent.
  visits = jnp.where(routed, routes.experts, params.expert_up.shape[0])
  inner = x if params.latent_down is None else linear(x, params.latent_down)
  weights = Experts(
    up=params.expert_up.astype(x.dtype),
    gate=None if params.expert_gate is None else params.expert_gate.astype(x.dtype),
    down=params.expert_down.astype(x.dtype),
    activation=config.mlp_activation,
  )
  if jax.sharding.get_abstract_mesh().size > 1:
    out, dropped = sharded_sum(weights, inner, visits, routes.gates, config)
  else:
    tokens, ids, gates = (v.reshape(-1, v.shape[-1]) for v in (inner, visits, routes.gates))
    weights = of_tokens(weights, lambda own: jnp.repeat(own, len(tokens) // len(own), axis=0))
    out = weighted_sum(weights, tokens, ids, gates, config.expert_block).reshape(inner.shape)
    dropped = jnp.zeros((), jnp.float32)
  if config.zero_experts:
    kept = jnp.where(routes.experts < config.num_experts, 0.0, routes.gates)
    out = out + x * jnp.sum(kept, axis=-1, keepdims=True).astype(x.dtype)
  if params.latent_up is not None:
    out = linear(out, params.latent_up)
  if params.shared is not None:
    out = out + mlp(params.shared, x, config.mlp_activation)
  return out, _summary(routes, segment_ids, dropped)


def bias_change(
  load: Float[Array, "*lead experts"], rate: float | Array, config: ModelConfig
) -> Float[Array, "*lead experts"]:
  """The change of each expert's bias by balancing without a loss.

  "sign": ``rate * sign(mean load - load_e)`` (2408.15664). "proportional": for each of the E routed
  experts ``rate * ((K_e / K) / E - load_e / sum load)``, 0 for zero experts (2509.01322): K choices
  of a token, of which K_e should be routed experts.

  Args:
    load: tokens of the whole batch sent to each expert; 0 everywhere changes nothing.
  """
  if config.router_bias_rule == "sign":
    return rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
  choices = config.experts_per_token
  active = choices if config.active_experts is None else config.active_experts
  total = jnp.sum(load, axis=-1, keepdims=True)
  gap = active / choices / config.num_experts - load / jnp.maximum(total, 1.0)
  moves = (jnp.arange(load.shape[-1]) < config.num_experts) & (total > 0)
  return jnp.where(moves, rate * gap, 0.0)


def _route(params: Moe, x: Array, config: ModelConfig, experts: Array | None) -> _Routes:
  router = jax.lax.stop_gradient(params.router) if config.frozen_router else params.router
  logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
  if config.router_scores == "sigmoid":
    scores = jax.nn.sigmoid(logits)
  else:
    scores = jax.nn.softmax(logits, axis=-1)
  biased = scores + params.router_bias
  if config.num_expert_groups > 1:
    biased = _in_best_groups(biased, config)
  _, best = jax.lax.top_k(biased, config.experts_per_token)
  experts = best if experts is None else jnp.where(experts < 0, best, experts)
  gates = _at(scores, experts)
  if config.norm_topk:
    gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
  gates = gates * config.routed_scaling
  if params.expert_scale is not None:
    gates = gates * _at(params.expert_scale, experts)
  return _Routes(logits=logits, scores=scores, experts=experts, gates=gates)


def _at(values: Array, ids: Array) -> Array:
  """``values[..., ids]``, whose gradient is a sum over choices and no scatter."""
  chosen = jax.nn.one_hot(ids, values.shape[-1], dtype=jnp.float32)
  return jnp.sum(chosen * values[..., None, :], axis=-1)


def _in_best_groups(biased: Array, config: ModelConfig) -> Array:
  """Minus infinity outside the best groups of experts."""
  groups = biased.reshape(*biased.shape[:-1], config.num_expert_groups, -1)
  score = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
  _, best = jax.lax.top_k(score, config.expert_groups_per_token)
  inside = jnp.any(best[..., None] == jnp.arange(config.num_expert_groups), axis=-2)
  return jnp.where(inside[..., None], groups, -jnp.inf).reshape(biased.shape)


def _summary(routes: _Routes, segment_ids: Array, dropped: Array) -> Routing:
  real = (segment_ids != 0).astype(jnp.float32)[..., None]
  tokens = jnp.maximum(jnp.sum(real), 1.0)
  everywhere = tuple(range(segment_ids.ndim))
  num_experts = routes.scores.shape[-1]
  # [..., E + Z]: how often a token chose an expert, and the expert's share of its scores.
  chosen = jnp.sum(jax.nn.one_hot(routes.experts, num_experts, dtype=jnp.float32), axis=-2) * real
  relative = routes.scores / jnp.sum(routes.scores, axis=-1, keepdims=True) * real
  load = jnp.sum(chosen, axis=everywhere)
  share = load / jnp.maximum(jnp.sum(load), 1.0)
  mean = jnp.sum(relative, axis=everywhere) / tokens
  log_total = jax.nn.logsumexp(routes.logits, axis=-1, keepdims=True)
  return Routing(
    experts=routes.experts,
    load=load,
    dropped=dropped,
    balance_loss=num_experts * jnp.sum(share * mean),
    mean_scores=mean,
    sequence_balance_loss=_sequence_balance_loss(
      chosen, relative, segment_ids, routes.experts.shape[-1]
    ),
    router_z_loss=jnp.sum(jnp.square(log_total) * real) / tokens,
  )


def _sequence_balance_loss(
  chosen: Array, relative: Array, segment_ids: Array, choices: int
) -> Array:
  """``mean over sequences of E sum_e f_e p_e``, f and p as counted within the sequence.

  Written as a sum over tokens, each with the f of its sequence, which is the difference of two
  running counts: exact, and no array has an axis of sequences.
  """
  first, last = _ends(segment_ids)
  counts = jnp.cumsum(jax.lax.stop_gradient(chosen), axis=-2)
  before = jnp.pad(counts, [(0, 0)] * (counts.ndim - 2) + [(1, 0), (0, 0)])
  inside = jnp.take_along_axis(counts, last[..., None], axis=-2)
  inside -= jnp.take_along_axis(before, first[..., None], axis=-2)
  length = (last - first + 1).astype(jnp.float32)
  per_token = jnp.sum(inside * relative, axis=-1) / (choices * jnp.square(length))
  starts = (first == jnp.arange(first.shape[-1])) & (segment_ids != 0)
  return chosen.shape[-1] * jnp.sum(per_token) / jnp.maximum(jnp.sum(starts), 1)


def _ends(segment_ids: Array) -> tuple[Array, Array]:
  """Index of the first and of the last token of each token's sequence, int32, as segment_ids."""
  time = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1]), segment_ids.shape)
  changes = segment_ids[..., 1:] != segment_ids[..., :-1]
  edge = jnp.ones_like(segment_ids[..., :1], bool)
  axis = segment_ids.ndim - 1
  first = jnp.where(jnp.concatenate([edge, changes], axis=-1), time, 0)
  last = jnp.where(jnp.concatenate([changes, edge], axis=-1), time, time.shape[-1])
  return (
    jax.lax.cummax(first, axis=axis),
    jax.lax.cummin(last, axis=axis, reverse=True),
  )
