"""What a mixture block computes: the sum over experts, whichever way it is computed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models import experts as experts_module
from agentjax.models import moe as moe_module
from agentjax.models.experts import Experts
from agentjax.models.moe import moe_spec

moe = jax.jit(moe_module.moe, static_argnums=2)


def drawn(config, seed=0):
  params = models.init_params(moe_spec(config), jax.random.key(seed))
  bias = 0.1 * jax.random.normal(jax.random.key(seed + 1), params.router_bias.shape)
  if params.expert_scale is not None:
    scale = jax.random.uniform(jax.random.key(seed + 2), params.expert_scale.shape)
    params = params.replace(expert_scale=0.5 + scale)
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
    logits = token @ w.router
    if config.router_scores == "sigmoid":
      scores = 1 / (1 + np.exp(-logits))
    else:
      scores = np.exp(logits - logits.max())
      scores /= scores.sum()
    chosen = np.argsort(-(scores + w.router_bias))[: config.experts_per_token]
    total = scores[chosen].sum() if config.norm_topk else 1.0
    inner = token if w.latent_down is None else token @ w.latent_down
    mixed = np.zeros(inner.shape)
    for e in chosen:
      gain = scores[e] / total * config.routed_scaling
      gain *= 1.0 if w.expert_scale is None else w.expert_scale[e]
      if e >= config.num_experts:
        mixed += gain * inner
        continue
      gate = None if w.expert_gate is None else w.expert_gate[e]
      mixed += gain * ffn(w.expert_up[e], gate, w.expert_down[e], inner)
    out[i] = mixed if w.latent_up is None else mixed @ w.latent_up
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
    {"latent_size": 12, "routed_scaling": 5.0},
    {"latent_size": 12, "mlp_activation": "swiglu", "expert_scale": True},
    {"router_scores": "softmax", "zero_experts": 3, "experts_per_token": 4, "norm_topk": False},
  ],
  ids=str,
)
def test_a_mixture_is_the_sum_over_the_chosen_experts(tiny, tokens, changes):
  config = dataclasses.replace(tiny, **changes)
  config.validate()
  params = drawn(config)
  x = jax.random.normal(jax.random.key(2), (tokens, config.d_model))
  out, stats = moe(params, x, config, segment_ids=jnp.ones(tokens, int))
  np.testing.assert_allclose(out, one_by_one(params, x, config), atol=2e-5)
  assert jnp.sum(stats.load) == tokens * config.experts_per_token
  assert stats.dropped == 0


def ways_to_compute(block):
  """Every way a platform may take, forced."""

  def blocks(experts, rows, ids):
    return experts_module._in_blocks(experts, rows, ids, block)

  def sums(run):
    return lambda experts, *given: experts_module._sum_of_rows(run, experts, *given)

  return {
    "all experts": experts_module._all_experts,
    "blocks": sums(blocks),
    "ragged": sums(experts_module._ragged),
  }


@pytest.mark.parametrize(
  ("block", "gated", "crowded"), [(4, False, False), (32, True, False), (4, True, True)]
)
def test_all_ways_to_compute_agree_and_drop_no_token(block, gated, crowded):
  """Also where every token goes to the same experts, and where some go to none (id 8)."""
  rng = np.random.default_rng(0)
  shape = {"up": (8, 24, 16), "gate": (8, 24, 16), "down": (8, 16, 24)}
  weights = {k: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for k, s in shape.items()}
  weights = weights if gated else {**weights, "gate": None}
  experts = Experts(**weights, activation="swiglu" if gated else "relu2")
  tokens = jnp.asarray(rng.normal(size=(75, 24)), jnp.float32)
  ids = np.argsort(rng.random((75, 9)), axis=1)[:, :2]
  if crowded:
    ids[:] = (3, 8)
  ids[:4] = 8
  gates = jnp.asarray(rng.random((75, 2)), jnp.float32)

  def run(way):
    def total(experts, tokens, gates):
      out = way(experts, tokens, jnp.asarray(ids, jnp.int32), gates)
      return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(experts, tokens, gates)

  ways = ways_to_compute(block)
  (_, want), want_grads = run(ways.pop("all experts"))
  np.testing.assert_array_equal(want[:4], 0.0)
  for way in ways.values():
    (_, got), grads = run(way)
    np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=5e-5), grads, want_grads)


def test_many_tokens_are_sorted_and_few_are_not():
  few, many = jnp.zeros((64, 2), int), jnp.zeros((4096, 2), int)
  assert experts_module._every_expert_is_cheaper(few, 8, block=128)
  assert not experts_module._every_expert_is_cheaper(many, 8, block=128)


def test_a_tpu_gets_ragged_products_from_whatever_machine_lowers_for_it(tiny):
  """And a CPU its blocks: lowering needs no such device."""
  params = drawn(tiny)
  x = jnp.zeros((96, tiny.d_model))
  ids = jnp.ones(96, int)
  lowered = {
    platform: jax.export.export(moe, platforms=[platform])(params, x, tiny, segment_ids=ids)
    for platform in ("cpu", "tpu")
  }
  assert "ragged_dot" in lowered["tpu"].mlir_module()
  assert "ragged_dot" not in lowered["cpu"].mlir_module()


def test_padding_visits_no_routed_expert(tiny):
  config = dataclasses.replace(tiny, d_shared_expert=0)
  x = jax.random.normal(jax.random.key(2), (2, 10, tiny.d_model))
  segments = jnp.where(jnp.arange(10) < 7, 1, 0) * jnp.ones((2, 1), int)
  out, _ = moe(drawn(config), x, config, segment_ids=segments)
  assert jnp.all(out[:, 7:] == 0.0) and jnp.all(jnp.any(out[:, :7] != 0.0, axis=-1))
