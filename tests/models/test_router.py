"""Which experts a token visits, with what gates, and what the router reports."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models import moe as moe_module
from agentjax.models.moe import bias_change
from tests.models.test_moe import drawn, moe

EXPERTS = 8


@pytest.fixture(scope="module")
def config(tiny):
  return dataclasses.replace(tiny, num_experts=EXPERTS, experts_per_token=3)


def some_tokens(config, shape, seed=2):
  return jax.random.normal(jax.random.key(seed), (*shape, config.d_model))


def routes(params, x, config, experts=None):
  return jax.jit(moe_module._route, static_argnums=2)(params, x, config, experts)


def losses(stats):
  return jnp.stack([stats.balance_loss, stats.sequence_balance_loss, stats.router_z_loss])


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_only_experts_of_the_best_groups_are_chosen(config, kept):
  config = dataclasses.replace(
    config, num_expert_groups=4, expert_groups_per_token=kept, experts_per_token=2
  )
  config.validate()
  params, x = drawn(config), some_tokens(config, (50,))
  found = routes(params, x, config)
  biased = np.asarray(found.scores + params.router_bias).reshape(50, 4, 2)
  for token, chosen in zip(biased, found.experts, strict=True):
    best = np.argsort(-np.sort(token)[:, -2:].sum(1))[:kept]
    allowed = np.where(np.isin(np.arange(4), best)[:, None], token, -np.inf).ravel()
    np.testing.assert_array_equal(chosen, np.argsort(-allowed)[:2])


def test_the_bias_moves_the_choice_and_no_gate(config):
  params, x = drawn(config), some_tokens(config, (20,))
  pushed = routes(params.replace(router_bias=params.router_bias.at[5].add(10.0)), x, config)
  assert jnp.all(pushed.experts[:, 0] == 5)
  chosen = jnp.take_along_axis(pushed.scores, pushed.experts, axis=1)
  np.testing.assert_allclose(pushed.gates, chosen / chosen.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_the_router_is_float32_whatever_the_compute_dtype(config, scores):
  config = dataclasses.replace(config, router_scores=scores)
  params, x = drawn(config), some_tokens(config, (20,)).astype(jnp.bfloat16)
  narrow, wide = (routes(params, v, config) for v in (x, x.astype(jnp.float32)))
  jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def test_replayed_experts_get_the_gates_of_the_tokens_at_hand(config):
  params, x = drawn(config), some_tokens(config, (2, 9))
  own = routes(params, x, config)
  others = (own.experts + 1) % EXPERTS
  segments = jnp.ones((2, 9), int)

  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(params, experts):
    out, stats = moe_module.moe(params, x, config, segment_ids=segments, experts=experts)
    return jnp.sum(jnp.sin(out)), stats

  run = jax.jit(run)
  _, gradient = run(params, own.experts)
  jax.tree.map(np.testing.assert_array_equal, gradient, run(params, None)[1])
  (_, stats), gradient = run(params, others)
  np.testing.assert_array_equal(stats.experts, others)
  np.testing.assert_array_equal(stats.load, np.bincount(others.ravel(), minlength=EXPERTS))
  scores = jnp.take_along_axis(own.scores, others, axis=-1)
  gates = routes(params, x, config, others).gates
  np.testing.assert_allclose(gates, scores / scores.sum(-1, keepdims=True), rtol=1e-6)
  assert jnp.max(jnp.abs(gradient.router)) > 1e-3


def test_a_frozen_router_gets_no_gradient_and_its_input_does(config):
  x = some_tokens(config, (9,))

  def gradient(config):
    def loss(params, x):
      out, stats = moe_module.moe(params, x, config, segment_ids=jnp.ones(9, int))
      return jnp.sum(jnp.sin(out)) + jnp.sum(losses(stats))

    return jax.jit(jax.grad(loss, (0, 1)))(drawn(config), x)

  frozen = dataclasses.replace(config, frozen_router=True)
  (free, to_x), (stopped, frozen_to_x) = gradient(config), gradient(frozen)
  assert jnp.max(jnp.abs(free.router)) > 1e-3 and jnp.all(stopped.router == 0.0)
  np.testing.assert_allclose(frozen_to_x, to_x, rtol=1e-6)
  np.testing.assert_allclose(stopped.expert_up, free.expert_up, rtol=1e-6)
  assert not moe_module.moe_spec(frozen).router.trained


def test_what_the_router_reads_can_be_given(config):
  params, x = drawn(config), some_tokens(config, (9,))
  segments, other = jnp.ones(9, int), some_tokens(config, (9,), seed=5)
  _, stats = moe(params, x, config, segment_ids=segments, router_input=other)
  np.testing.assert_array_equal(stats.experts, routes(params, other, config).experts)


def test_losses_are_those_of_their_formulas_sequence_by_sequence(config):
  """Several sequences a row, padding between and behind; segment ids repeat in other rows."""
  params, x = drawn(config), some_tokens(config, (3, 12))
  segments = np.zeros((3, 12), int)
  segments[0, :5], segments[0, 5:6], segments[0, 8:] = 1, 2, 3
  segments[1, 1:] = 1
  _, stats = moe(params, x, config, segment_ids=jnp.asarray(segments))

  found = routes(params, x, config)
  logits, scores = np.asarray(found.logits, np.float64), np.asarray(found.scores, np.float64)
  shares = scores / scores.sum(-1, keepdims=True)
  hits = np.eye(EXPERTS)[np.asarray(found.experts)].sum(-2)

  def balance(where):
    return EXPERTS * np.sum(hits[where].mean(0) / 3 * shares[where].mean(0))

  members = [(0, 1), (0, 2), (0, 3), (1, 1)]
  rows = np.arange(3)[:, None]
  each = [balance((rows == row) & (segments == i)) for row, i in members]
  total = np.log(np.exp(logits).sum(-1))
  real = segments != 0
  np.testing.assert_allclose(stats.load, hits[real].sum(0))
  np.testing.assert_allclose(stats.balance_loss, balance(real), rtol=1e-6)
  np.testing.assert_allclose(stats.sequence_balance_loss, np.mean(each), rtol=1e-6)
  np.testing.assert_allclose(stats.router_z_loss, np.mean(total[real] ** 2), rtol=1e-6)


def test_padding_is_in_no_router_statistic(config):
  params, x = drawn(config), some_tokens(config, (2, 10))
  real = jnp.arange(10) < jnp.array([[10], [6]])
  _, stats = moe(params, x, config, segment_ids=real.astype(int))
  other = jnp.where(real[..., None], x, 9.0)
  _, again = moe(params, other, config, segment_ids=real.astype(int))
  assert jnp.sum(stats.load) == 16 * config.experts_per_token
  np.testing.assert_array_equal(stats.load, again.load)
  np.testing.assert_allclose(losses(stats), losses(again), rtol=1e-6)
  _, nothing = moe(params, x, config, segment_ids=jnp.zeros((2, 10), int))
  np.testing.assert_array_equal(losses(nothing), 0.0)


def test_the_balance_loss_is_one_at_balance_and_grows_with_crowding(config):
  params, x = drawn(config), some_tokens(config, (64,))
  segments = jnp.ones(64, int)
  level = params.replace(router=0 * params.router, router_bias=0 * params.router_bias)
  crowded = params.replace(router=params.router.at[:, 0].add(2.0 * jnp.sign(x.mean(0))))
  _, stats = moe(level, x, config, segment_ids=segments)
  np.testing.assert_allclose(losses(stats), [1.0, 1.0, np.log(EXPERTS) ** 2], rtol=1e-6)
  _, stats = moe(crowded, jnp.abs(x), config, segment_ids=segments)
  assert jnp.all(losses(stats)[:2] > 1.1)


def test_the_bias_moves_by_the_sign_of_the_gap_or_in_proportion_to_it(config):
  load = jnp.array([[4.0, 1, 1, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
  sign = dataclasses.replace(config, num_experts=4, zero_experts=2)
  np.testing.assert_allclose(
    bias_change(load, 0.5, sign), [[-0.5, 0.5, 0.5, -0.5, 0.5, 0.5], [0.0] * 6]
  )
  # Two choices in three are to be routed experts, four of them: a share of 1/6 each.
  scaled = dataclasses.replace(sign, router_bias_rule="proportional", active_experts=2.0)
  scaled.validate()
  share = 1 / 6
  want = [share - 0.5, share - 0.125, share - 0.125, share - 0.25, 0.0, 0.0]
  np.testing.assert_allclose(
    bias_change(load, 0.5, scaled), [0.5 * np.array(want), [0.0] * 6], rtol=1e-6
  )


@pytest.mark.slow
def test_the_proportional_rule_brings_the_wanted_number_of_routed_experts(config):
  config = dataclasses.replace(
    config,
    router_scores="softmax",
    zero_experts=4,
    experts_per_token=4,
    norm_topk=False,
    router_bias_rule="proportional",
    active_experts=3.0,
  )
  params, x = drawn(config), some_tokens(config, (256,))
  segments = jnp.ones(256, int)

  def step(params, rate):
    _, stats = moe_module.moe(params, x, config, segment_ids=segments)
    change = bias_change(stats.load, rate, config)
    return params.replace(router_bias=params.router_bias + change), stats.load

  first = step(params, 0.0)[1]
  load = jax.lax.scan(step, params, jnp.full(400, 0.1))[1][-1]
  assert abs(jnp.sum(load[:EXPERTS]) / 256 - 3) < 0.1 < abs(jnp.sum(first[:EXPERTS]) / 256 - 3)
  assert jnp.max(jnp.abs(load[:EXPERTS] / 256 - 3 / 8)) < 0.1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_expert_groups": 3}, "num_expert_groups=3.*divisor of num_experts=8"),
    ({"num_expert_groups": 8}, "two experts or more in a group"),
    ({"num_expert_groups": 2, "zero_experts": 2}, "without zero_experts"),
    ({"expert_groups_per_token": 2}, "expert_groups_per_token=2.*from 1 to num_expert_groups=1"),
    ({"num_expert_groups": 4}, "experts_per_token=3.*at most the 2 experts that a token can reach"),
    ({"zero_experts": 2, "latent_size": 4}, "zero_experts=2.*0 with a latent_size"),
    ({"active_experts": 4.0}, "active_experts=4.0.*at most experts_per_token=3"),
    ({"expert_capacity": 0.0}, "expert_capacity=0.0; allowed: > 0 or none"),
  ],
  ids=str,
)
def test_settings_that_cannot_route_are_refused(config, changes, message):
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(config, **changes).validate()


def test_a_stack_reports_the_mean_of_losses_and_the_sum_of_what_was_dropped(tiny, tiny_params):
  rows = jnp.ones((1, 8), int), jnp.ones((1, 8), int), jnp.arange(8)[None]
  out = jax.jit(models.forward, static_argnums=1)(tiny_params, tiny, *rows)
  routing = jax.tree.map(lambda v: jnp.concatenate([v, 2 * v]), out.routing)
  both = out.replace(routing=routing)
  for name in ("balance_loss", "sequence_balance_loss", "router_z_loss"):
    np.testing.assert_allclose(getattr(both, name), 1.5 * getattr(out, name), rtol=1e-6)
    assert getattr(out, name) > 0
  dropped = routing.replace(dropped=jnp.array([2.0, 3.0]))
  assert out.replace(routing=dropped).dropped == 5.0
  assert out.replace(routing=None).dropped == 0.0
