import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.model_families import longcat_flash
from agentjax.models.config import MlaConfig
from agentjax.models.mla import mla
from agentjax.models.mlp import mlp
from agentjax.models.moe import moe
from agentjax.models.norm import rms_norm
from agentjax.models.presets import model_preset
from agentjax.models.spec import count
from tests.models import invariances
from tests.models.rows import draw

CONFIG = models.ModelConfig(
  vocab_size=41,
  d_model=24,
  pattern="SS",
  num_heads=4,
  rope_theta=1e4,
  mla=MlaConfig(
    query_lora=16, kv_lora=12, nope_dim=6, rope_dim=4, value_dim=10, align_variance=True
  ),
  attention_block=8,
  d_mlp=40,
  mlp_activation="swiglu",
  num_experts=4,
  zero_experts=3,
  experts_per_token=3,
  d_expert=16,
  d_shared_expert=0,
  router_scores="softmax",
  norm_topk=False,
  routed_scaling=6.0,
  expert_block=8,
  logits_chunk=7,
)
ONES = jnp.ones((2, 9), jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(9), (2, 9))


def layer(seed=0):
  return jax.tree.map(lambda w: w[0], draw(CONFIG, seed).groups[0][0])


def inputs():
  rng = np.random.default_rng(1)
  return jnp.asarray(rng.standard_normal((2, 9, CONFIG.d_model)), jnp.float32)


def attend(weights, x, index=0):
  del index
  return mla(weights, x, CONFIG, segment_ids=ONES, positions=POSITIONS)


def mix(weights, x):
  return moe(weights, x, CONFIG, segment_ids=ONES)


@jax.jit
def run(params, x):
  """The layer, and what its mixture gave."""
  mixed = []

  def record(weights, inputs):
    out, routing = mix(weights, inputs)
    mixed.append(out)
    return out, routing

  out, _, routing = longcat_flash.longcat_layer(params, x, CONFIG, attend=attend, mix=record)
  return out, mixed[0], routing


@jax.jit
def written_out(params, x):
  """The published order of the layer, without the mixture at its end."""
  first, second = params.first, params.second

  def norm(x, weight):
    return rms_norm(x, weight, CONFIG.norm_eps)

  x = x + attend(first.attention, norm(x, first.attention_norm))[0]
  shared = norm(x, first.mlp_norm)
  x = x + mlp(first.mlp, shared, "swiglu")
  x = x + attend(second.attention, norm(x, second.attention_norm))[0]
  return x + mlp(second.mlp, norm(x, second.mlp_norm), "swiglu"), mix(params.moe, shared)[0]


def test_the_mixture_reads_the_first_half_and_is_added_behind_the_second():
  params, x = layer(), inputs()
  out, mixed, _ = run(params, x)
  dense, expected = written_out(params, x)
  np.testing.assert_allclose(mixed, expected, atol=1e-6)
  np.testing.assert_allclose(out, dense + mixed, atol=1e-5)
  assert float(jnp.max(jnp.abs(mixed))) > 0.1


def test_the_second_half_leaves_every_bit_of_the_mixture():
  params, x = layer(), inputs()
  other = params.replace(second=jax.tree.map(lambda w: 1.3 * w + 0.1, params.second))
  (out, mixed, routing), (changed, same, same_routing) = run(params, x), run(other, x)
  np.testing.assert_array_equal(mixed, same)
  np.testing.assert_array_equal(routing.experts, same_routing.experts)
  assert float(jnp.max(jnp.abs(out - changed))) > 1e-2


def test_with_zero_experts_alone_the_mixture_is_its_input_times_their_gates():
  params, x = layer(), inputs()
  bias = jnp.where(jnp.arange(7) < CONFIG.num_experts, -10.0, 0.0)
  params = params.replace(moe=params.moe.replace(router_bias=bias))
  out, routing = jax.jit(mix)(params.moe, x)
  scores = jax.nn.softmax(x @ params.moe.router, axis=-1)
  np.testing.assert_array_equal(jnp.sort(routing.experts, axis=-1)[0, 0], [4, 5, 6])
  gates = jnp.sum(scores[..., CONFIG.num_experts :], axis=-1, keepdims=True)
  np.testing.assert_allclose(out, CONFIG.routed_scaling * gates * x, rtol=1e-5)


def test_the_published_model_has_560_billion_parameters_of_which_18_to_31_are_used():
  config = model_preset("longcat_flash_560b")
  config.validate()
  total = count(models.param_specs(config))
  assert total == pytest.approx(560e9, rel=2e-3)
  expert = 3 * config.d_model * config.d_expert * len(config.pattern)
  # The embedding is a look-up.
  always = total - config.num_experts * expert - config.vocab_size * config.d_model
  assert always == pytest.approx(18.6e9, rel=1e-2)
  assert always + config.experts_per_token * expert == pytest.approx(31.3e9, rel=5e-3)
  assert always + config.active_experts * expert == pytest.approx(27e9, rel=1e-2)


def test_balancing_moves_the_bias_of_routed_experts_in_every_layer():
  config = dataclasses.replace(CONFIG, router_bias_rule="proportional", active_experts=2)
  params = draw(config, seed=3)
  load = jnp.asarray([[9, 1, 1, 1, 5, 5, 5], [1, 1, 1, 9, 5, 5, 5]], jnp.float32)
  moved = models.update_router_bias(params, config, load, 1e-2)
  change = moved.groups[0][0].moe.router_bias - params.groups[0][0].moe.router_bias
  np.testing.assert_allclose(change[:, 4:], 0, atol=1e-9)
  assert (np.sign(change[:, :4]) == [[-1, 1, 1, 1], [1, 1, 1, -1]]).all()


def test_replayed_experts_of_decoding_are_those_that_training_uses():
  params = draw(CONFIG, seed=3)
  sequence = invariances.tokens(CONFIG, 9)[0]
  decode_params = models.prepare_decode_params(params, CONFIG)
  decoded = jax.jit(models.extend, static_argnums=1)(
    decode_params,
    CONFIG,
    models.init_cache(CONFIG, 2, 16),
    jnp.array([1]),
    jnp.asarray(sequence)[None],
    jnp.array([9]),
  )
  rows = jnp.asarray(sequence)[None], ONES[:1], POSITIONS[:1]
  forward = jax.jit(models.forward, static_argnums=1)
  free = forward(params, CONFIG, *rows)
  np.testing.assert_array_equal(decoded.experts, free.routing.experts)
  turned = (decoded.experts + 1) % 7
  replayed = forward(params, CONFIG, *rows, experts=turned)
  np.testing.assert_array_equal(replayed.routing.experts, turned)
  assert float(jnp.max(jnp.abs(replayed.hidden - free.hidden))) > 1e-2


def test_both_attentions_report_their_largest_scores():
  config = dataclasses.replace(CONFIG, record_max_scores=True)
  rows = jnp.asarray(invariances.tokens(CONFIG, 9)[0])[None], ONES[:1], POSITIONS[:1]
  out = jax.jit(models.forward, static_argnums=1)(draw(CONFIG, seed=3), config, *rows)
  assert out.max_scores.shape == (4, CONFIG.num_heads)
  assert len(np.unique(out.max_scores)) == 16


def test_decoding_is_what_training_sees():
  invariances.check_decoding(CONFIG)


@pytest.mark.slow
def test_packing_and_padding_do_not_matter():
  invariances.check_packing(CONFIG)


def test_slots_do_not_touch_each_other():
  invariances.check_slots(CONFIG)


def test_the_gradient_is_the_slope_of_the_loss():
  invariances.check_gradient(CONFIG)
