import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models import moe as moe_module
from agentjax.models.moe import moe_spec

moe = jax.jit(moe_module.moe, static_argnums=2)


def drawn(config, seed=0):
  params = models.init_params(moe_spec(config), jax.random.key(seed))
  bias = 0.1 * jax.random.normal(jax.random.key(seed + 1), params.router_bias.shape)
  return params.replace(router_bias=bias)


def one_by_one(params, x, config):
  """Token by token, expert by expert, in numpy."""
  out = np.zeros(x.shape)
  w = jax.tree.map(lambda v: np.asarray(v, np.float64), params)

  def ffn(up, gate, down, token):
    hidden = token @ up
    if gate is None:
      return (np.maximum(hidden, 0) ** 2) @ down
    opened = token @ gate
    return (opened / (1 + np.exp(-opened)) * hidden) @ down

  for i, token in enumerate(np.asarray(x, np.float64)):
    scores = 1 / (1 + np.exp(-token @ w.router))
    chosen = np.argsort(-(scores + w.router_bias))[: config.experts_per_token]
    total = scores[chosen].sum() if config.norm_topk else 1.0
    for e in chosen:
      gate = None if w.expert_gate is None else w.expert_gate[e]
      gain = scores[e] / total * config.routed_scaling
      out[i] += gain * ffn(w.expert_up[e], gate, w.expert_down[e], token)
    if w.shared is not None:
      out[i] += ffn(w.shared.up, w.shared.gate, w.shared.down, token)
  return out


@pytest.mark.parametrize("tokens", [3, 96])
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"mlp_activation": "swiglu", "norm_topk": False, "routed_scaling": 2.5},
    {"d_shared_expert": 0, "experts_per_token": 1},
  ],
)
def test_a_mixture_is_the_sum_over_the_chosen_experts(tiny, tokens, changes):
  config = dataclasses.replace(tiny, **changes)
  params = drawn(config)
  x = jax.random.normal(jax.random.key(2), (tokens, config.d_model))
  out, stats = moe(params, x, config, real=jnp.ones(tokens, bool))
  np.testing.assert_allclose(out, one_by_one(params, x, config), atol=2e-5)
  assert jnp.sum(stats.load) == tokens * config.experts_per_token


@pytest.mark.parametrize("experts", [4, 8])
@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("crowded", [False, True])
def test_sorting_by_expert_drops_no_token(tiny, experts, block, crowded):
  """Also where every token goes to the same experts, which would overflow any capacity."""
  config = dataclasses.replace(tiny, num_experts=experts)
  params = drawn(config)
  if crowded:
    params = params.replace(router_bias=params.router_bias.at[1:3].add(100.0))
  x = jax.random.normal(jax.random.key(2), (75, config.d_model))

  def run(sorts):
    def total(params, x):
      routes = moe_module._route(params, x, config, None)
      if sorts:
        out = moe_module._sorted_experts(params, x, routes, block)
      else:
        out = moe_module._all_experts(params, x, routes)
      return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)

  (_, plain), plain_grads = run(False)
  (_, ours), grads = run(True)
  np.testing.assert_allclose(ours, plain, atol=1e-5)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=5e-5), grads, plain_grads)


def test_many_tokens_are_sorted_and_few_are_not(tiny):
  config = dataclasses.replace(tiny, num_experts=8, expert_block=128)
  assert moe_module._every_expert_is_cheaper(64, config)
  assert not moe_module._every_expert_is_cheaper(4096, config)


def test_padding_is_in_no_router_statistic(tiny):
  params = drawn(tiny)
  x = jax.random.normal(jax.random.key(2), (2, 10, tiny.d_model))
  real = jnp.arange(10) < jnp.array([[10], [6]])
  _, stats = moe(params, x, tiny, real=real)
  _, other = moe(params, jnp.where(real[..., None], x, 9.0), tiny, real=real)
  _, alone = moe(params, x[real], tiny, real=jnp.ones(16, bool))
  assert jnp.sum(stats.load) == 16 * tiny.experts_per_token
  np.testing.assert_array_equal(stats.load, other.load)
  np.testing.assert_array_equal(stats.load, alone.load)
  np.testing.assert_allclose(stats.balance_loss, other.balance_loss, rtol=1e-6)
  np.testing.assert_allclose(stats.balance_loss, alone.balance_loss, rtol=1e-6)


def test_the_balance_loss_is_one_at_balance_and_grows_with_crowding(tiny):
  params = drawn(tiny)
  x = jax.random.normal(jax.random.key(2), (64, tiny.d_model))
  level = params.replace(router=0 * params.router, router_bias=0 * params.router_bias)
  loss = {}
  for name, candidate in {"level": level, "as drawn": params}.items():
    loss[name] = moe(candidate, x, tiny, real=jnp.ones(64, bool))[1].balance_loss
  crowded = params.replace(router=params.router.at[:, 0].add(2.0 * jnp.sign(x.mean(0))))
  loss["crowded"] = moe(crowded, jnp.abs(x), tiny, real=jnp.ones(64, bool))[1].balance_loss
  np.testing.assert_allclose(loss["level"], 1.0, rtol=1e-6)
  assert loss["crowded"] > 1.1
