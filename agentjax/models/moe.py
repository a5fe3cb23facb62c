"""Mixture of experts: sigmoid router, routed and shared experts, no token ever dropped."""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.mlp import Mlp, activate, mlp, mlp_spec
from agentjax.models.products import matmul, precision
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array


@flax.struct.dataclass
class Moe:
  """Weights; ``expert_gate`` is None for squared ReLU, ``shared`` without a shared expert."""

  router: Weight  # [embed, experts] float32
  router_bias: Weight  # [experts] float32; moves the choice only, and only ``update_router_bias``
  expert_up: Weight  # [experts, embed, expert_mlp]
  expert_gate: Weight | None  # [experts, embed, expert_mlp]
  expert_down: Weight  # [experts, expert_mlp, embed]
  shared: Mlp | None


@flax.struct.dataclass
class Routing:
  """What one block routed. Only tokens that are not padding count in sums and means.

  Attributes:
    experts: int32 [..., choices], ids of the experts of each token, padding too.
    load: float32 [experts], tokens sent to each expert.
    balance_loss: float32 scalar ``E sum_e f_e p_e``: f_e the share of the choices that fell on e,
      p_e the mean of its score among all scores of a token; 1 at balance. Gradients reach p only.
  """

  experts: Array
  load: Array
  balance_loss: Array


class _Routes(NamedTuple):
  scores: Array  # float32 [tokens, experts], after the sigmoid
  experts: Array  # int32 [tokens, choices]
  gates: Array  # float32 [tokens, choices]


def moe_spec(config: ModelConfig) -> Moe:
  """Abstract parameters of one mixture block."""
  experts, width = config.num_experts, config.d_expert
  into = ParamSpec(
    (experts, config.d_model, width),
    ("experts", "embed", "expert_mlp"),
    config.param_dtype,
    scale=config.init_scale * config.d_model**-0.5,
  )
  return Moe(
    router=ParamSpec(
      (config.d_model, experts),
      ("embed", None),
      scale=config.init_scale * config.d_model**-0.5,
      wide=True,
    ),
    router_bias=ParamSpec(
      (experts,), (None,), init="zeros", trained=False, decayed=False, wide=True
    ),
    expert_up=into,
    expert_gate=into if config.mlp_activation == "swiglu" else None,
    expert_down=ParamSpec(
      (experts, width, config.d_model),
      ("experts", "expert_mlp", "embed"),
      config.param_dtype,
      scale=config.init_scale * config.residual_scale * width**-0.5,
    ),
    shared=mlp_spec(config, config.d_shared_expert) if config.d_shared_expert else None,
  )


def moe(
  params: Moe,
  x: Float[Array, "*lead embed"],
  config: ModelConfig,
  *,
  real: Bool[Array, "*lead"],
  experts: Int[Array, "*lead choices"] | None = None,
) -> tuple[Float[Array, "*lead embed"], Routing]:
  """``routed_scaling * sum_{e in top k} g_e f_e(x) + shared(x)``.

  Scores ``s = sigmoid(router x)`` in float32; the k experts with the largest ``s + bias`` are
  chosen; gates g are their scores, divided by their sum where ``norm_topk``. A token's result
  depends on no other token: there is no capacity to overflow.

  Args:
    x: any leading axes.
    real: False at padding, which is left out of the statistics.
    experts: ids to use in the place of the k largest, as recorded in sampling (router replay,
      2510.11370); gates are still those of x.

  References: DeepSeek-V3, 2412.19437 (sigmoid scores); Wang et al., 2408.15664 (the bias);
  Nemotron 3, 2512.20856.
  """
  tokens = x.reshape(-1, x.shape[-1])
  if experts is not None:
    experts = experts.reshape(-1, experts.shape[-1])
  routes = _route(params, tokens, config, experts)
  if _every_expert_is_cheaper(tokens.shape[0], config):
    out = _all_experts(params, tokens, routes)
  else:
    out = _sorted_experts(params, tokens, routes, config.expert_block)
  out = out.reshape(x.shape)
  if params.shared is not None:
    out = out + mlp(params.shared, x)
  return out, _summary(routes, real)


def _route(params: Moe, tokens: Array, config: ModelConfig, experts: Array | None) -> _Routes:
  logits = jnp.matmul(
    tokens.astype(jnp.float32), params.router, precision=jax.lax.Precision.HIGHEST
  )
  scores = jax.nn.sigmoid(logits)
  if experts is None:
    _, experts = jax.lax.top_k(scores + params.router_bias, config.experts_per_token)
  chosen = jax.nn.one_hot(experts, config.num_experts, dtype=jnp.float32)
  gates = jnp.sum(chosen * scores[:, None], axis=-1)
  if config.norm_topk:
    gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
  return _Routes(scores=scores, experts=experts, gates=gates * config.routed_scaling)


def _summary(routes: _Routes, real: Array) -> Routing:
  experts, real = routes.experts.reshape(*real.shape, -1), real.reshape(-1)
  num_experts = routes.scores.shape[-1]
  chosen = jax.nn.one_hot(routes.experts, num_experts, dtype=jnp.float32)
  load = jnp.sum(jnp.where(real[:, None, None], chosen, 0.0), axis=(0, 1))
  share = load / jnp.maximum(jnp.sum(load), 1.0)
  relative = routes.scores / jnp.sum(routes.scores, axis=-1, keepdims=True)
  mean = jnp.sum(jnp.where(real[:, None], relative, 0.0), axis=0)
  mean = mean / jnp.maximum(jnp.sum(real), 1)
  return Routing(experts=experts, load=load, balance_loss=num_experts * jnp.sum(share * mean))


def _every_expert_is_cheaper(tokens: int, config: ModelConfig) -> bool:
  """Whether sorting saves less than half of the rows that all experts on all tokens take."""
  choices = tokens * config.experts_per_token
  blocks = _num_blocks(choices, config.num_experts, config.expert_block)
  return 2 * blocks * config.expert_block > tokens * config.num_experts


def _all_experts(params: Moe, tokens: Array, routes: _Routes) -> Array:
  """Every expert on every token, weighted by its gate, which is 0 where it was not chosen."""
  num_experts = params.expert_up.shape[0]
  dtype = tokens.dtype
  chosen = jax.nn.one_hot(routes.experts, num_experts, dtype=jnp.float32)
  gates = jnp.sum(chosen * routes.gates[..., None], axis=1).astype(dtype)
  product = functools.partial(jnp.einsum, precision=precision(dtype))
  hidden = product("td,edf->tef", tokens, params.expert_up.astype(dtype))
  gate = None
  if params.expert_gate is not None:
    gate = product("td,edf->tef", tokens, params.expert_gate.astype(dtype))
  hidden = activate(hidden, gate) * gates[..., None]
  return product("tef,efd->td", hidden, params.expert_down.astype(dtype))


def _num_blocks(choices: int, num_experts: int, block: int) -> int:
  """Blocks that hold any split of ``choices`` rows over the experts, each expert in its own."""
  return min(-(-choices // block) + num_experts - 1, choices)


def _sorted_experts(params: Moe, tokens: Array, routes: _Routes, block: int) -> Array:
  """Sorts the (token, choice) pairs by expert into blocks of rows that share one expert."""
  num_experts = params.expert_up.shape[0]
  dtype = tokens.dtype
  choices = routes.experts.reshape(-1)
  blocks = _num_blocks(choices.size, num_experts, block)

  chosen = jax.nn.one_hot(choices, num_experts, dtype=jnp.int32)
  rank = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=1)
  last_block = jnp.cumsum(-(-jnp.sum(chosen, axis=0) // block))
  first_block = jnp.concatenate([jnp.zeros((1,), jnp.int32), last_block[:-1]])
  place = first_block[choices] * block + rank  # row of each pair, unique
  source = jnp.full((blocks * block,), choices.size, jnp.int32)  # pair of each row
  source = source.at[place].set(jnp.arange(choices.size, dtype=jnp.int32))
  expert = jnp.minimum(
    jnp.searchsorted(last_block, jnp.arange(blocks), side="right"), num_experts - 1
  )

  pairs = jnp.repeat(tokens, routes.experts.shape[1], axis=0)
  rows = _permute(pairs, source, place).reshape(blocks, block, -1)
  hidden = matmul(rows, params.expert_up.astype(dtype)[expert])
  gate = None
  if params.expert_gate is not None:
    gate = matmul(rows, params.expert_gate.astype(dtype)[expert])
  out = matmul(activate(hidden, gate), params.expert_down.astype(dtype)[expert])
  out = _permute(out.reshape(blocks * block, -1), place, source)
  out = out.reshape(*routes.gates.shape, -1) * routes.gates[..., None].astype(dtype)
  return jnp.sum(out, axis=1)


@jax.custom_vjp
def _permute(x: Array, source: Array, place: Array) -> Array:
  """``x[source]``, zeros where it is out of range; ``place`` is its inverse, for the gradient."""
  del place
  return x.at[source].get(mode="fill", fill_value=0)


def _permute_forward(x: Array, source: Array, place: Array) -> tuple[Array, tuple[Array, Array]]:
  return _permute(x, source, place), (source, place)


def _permute_backward(indices: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
  source, place = indices
  return _permute(gradient, place, source), None, None


_permute.defvjp(_permute_forward, _permute_backward)
