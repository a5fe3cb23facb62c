import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.model_families import gemma4 as family
from agentjax.adapters.model_families.gemma4_block import scaled_stream
from agentjax.config import ConfigError
from agentjax.models.config import Gemma4Config
from agentjax.models.presets import model_preset
from agentjax.models.spec import count
from tests.models import invariances
from tests.models.rows import draw, forward, pack, score_tokens

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hf"
# Layers of every kind but the mixing ones, with inputs of their own.
SHARED = models.ModelConfig(
  vocab_size=41,
  d_model=24,
  pattern="LGrR",
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  tie_embeddings=True,
  attention_block=8,
  d_mlp=32,
  mlp_activation="geglu",
  gemma=Gemma4Config(window=5, global_kv_heads=1, global_head_dim=16, per_layer_width=6),
  logits_chunk=7,
)
MIXED = dataclasses.replace(
  SHARED,
  pattern="xX",
  num_experts=4,
  experts_per_token=2,
  d_expert=16,
  d_shared_expert=0,
  router_scores="softmax",
  expert_scale=True,
  expert_block=8,
  gemma=dataclasses.replace(
    SHARED.gemma, per_layer_width=0, global_key_is_value=True, logit_softcap=None
  ),
)
BOTH = pytest.mark.parametrize(
  "config",
  [pytest.param(SHARED, id="shared", marks=pytest.mark.slow), pytest.param(MIXED, id="mixed")],
)


def with_pattern(pattern):
  return dataclasses.replace(SHARED, pattern=pattern)


def sequence(size=17):
  return invariances.tokens(SHARED, size)[0]


def hidden(config, params, tokens):
  return forward(params, config, *pack([tokens], [[0]], len(tokens))).hidden[0]


def moves(config, at):
  """By how much another token at ``at`` moves the last hidden state."""
  params, tokens = draw(config, seed=1), sequence()
  other = tokens.copy()
  other[at] = (other[at] + 1) % config.vocab_size
  apart = hidden(config, params, other)[-1] - hidden(config, params, tokens)[-1]
  return float(jnp.max(jnp.abs(apart)))


def test_a_local_layer_sees_its_window_and_a_global_one_all():
  assert moves(with_pattern("l"), at=17 - 5) > 1e-3
  assert moves(with_pattern("l"), at=17 - 6) == 0
  assert moves(with_pattern("Lr"), at=17 - 10) == 0
  assert moves(with_pattern("g"), at=0) > 1e-4
  assert moves(with_pattern("GR"), at=0) > 1e-4


def test_a_reading_layer_has_queries_only_and_attends_with_the_keys_of_the_lender():
  config = with_pattern("GR")
  specs = models.param_specs(config)
  reader = models.stack.unstack(specs.groups, config)[1].attention
  assert reader.key is None and reader.value is None and reader.key_norm is None
  params = draw(config, seed=2)

  def total(params, silent):
    if silent:  # what the lender itself adds to the stream
      lender = params.groups[0][0]
      attention = lender.attention.replace(out=jnp.zeros_like(lender.attention.out))
      group = (lender.replace(attention=attention), *params.groups[0][1:])
      params = params.replace(groups=(group, *params.groups[1:]))
    return jnp.sum(jnp.sin(hidden(config, params, sequence())))

  gradient = jax.jit(jax.grad(total), static_argnums=1)(params, True)
  lender = gradient.groups[0][0].attention
  for weight in (lender.key, lender.value, lender.key_norm):
    assert float(jnp.max(jnp.abs(weight))) > 1e-3


def test_only_layers_with_keys_of_their_own_have_a_cache():
  config = dataclasses.replace(model_preset("gemma4_e2b"), compute_dtype="bfloat16")
  cache = jax.eval_shape(functools.partial(models.init_cache, config, 2, 100))
  held = sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(cache.blocks))
  local, whole = 12 * 256, 3 * 512
  assert held / (2 * 100) == 2 * 2 * (local + whole)


def test_readers_have_mlps_twice_as_wide_where_the_config_says_so():
  for double, width in ((True, 64), (False, 32)):
    gemma = dataclasses.replace(SHARED.gemma, readers_double_mlp=double)
    config = dataclasses.replace(SHARED, gemma=gemma)
    blocks = models.stack.unstack(models.param_specs(config).groups, config)
    assert [block.mlp.up.shape[-1] for block in blocks] == [32] * 2 + [width] * 2


def test_inputs_of_layers_are_half_of_the_token_and_half_of_the_stream():
  params = draw(SHARED, seed=1)
  tokens = jnp.asarray(sequence())
  embedded = params.embedding[tokens]
  stream, inputs = scaled_stream(embedded, params.per_layer, SHARED, tokens)
  np.testing.assert_allclose(stream.x, embedded * 24**0.5, rtol=1e-6)
  seen = jnp.einsum("te,elp->tlp", embedded, params.per_layer.projection)
  # sqrt(embed) of the stream and 1 / sqrt(embed) of the projection cancel.
  seen = seen / jnp.sqrt(jnp.mean(seen**2, axis=-1, keepdims=True) + SHARED.norm_eps)
  wanted = seen * params.per_layer.norm + params.per_layer.table[tokens] * 6**0.5
  np.testing.assert_allclose(inputs, wanted / 2**0.5, atol=1e-5)


def test_roots_are_rounded_to_the_dtype_of_the_stream():
  stream, _ = scaled_stream(jnp.ones((1, 3072), jnp.bfloat16), None, _wide(3072), jnp.zeros(1))
  assert float(stream.x[0, 0]) == 55.5  # sqrt(3072) = 55.43


def _wide(width):
  return dataclasses.replace(MIXED, d_model=width)


def test_every_input_of_a_layer_matters_to_its_own_layer():
  params = draw(SHARED, seed=1)
  tokens = sequence(9)
  base = hidden(SHARED, params, tokens)
  for layer in range(len(SHARED.pattern)):
    table = params.per_layer.table.at[:, layer].multiply(-1.0)
    other = params.replace(per_layer=params.per_layer.replace(table=table))
    assert float(jnp.max(jnp.abs(hidden(SHARED, other, tokens) - base))) > 1e-3


def test_logits_are_capped_and_their_gradient_is_that_of_the_cap():
  config = dataclasses.replace(
    with_pattern("l"), gemma=dataclasses.replace(SHARED.gemma, logit_softcap=2.0)
  )
  params = draw(config, seed=1)
  rows = pack([sequence()], [[0]], 17)

  @jax.jit
  def plain(params):
    states = models.forward(params, config, *rows).hidden
    logits = states @ params.embedding.T
    log_probs = jax.nn.log_softmax(2.0 * jnp.tanh(logits / 2.0) / 0.7)[:, :-1]
    chosen = jnp.take_along_axis(log_probs, rows.token_ids[:, 1:, None], -1)[..., 0]
    entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
    return jnp.sum(jnp.cos(chosen) + entropies**2)

  @jax.jit
  def ours(params):
    scores = models.score_tokens(params, config, *rows, temperature=0.7)
    return jnp.sum(jnp.cos(scores.log_probs[:, 1:]) + scores.entropies[:, 1:] ** 2)

  (value, gradient), (wanted, expected) = (jax.value_and_grad(f)(params) for f in (ours, plain))
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-4), gradient, expected)
  logits = models.compute_logits(params, config, 100 * hidden(config, params, sequence()))
  assert 1.9 < float(jnp.max(jnp.abs(logits))) <= 2.0


@pytest.mark.parametrize(
  ("name", "billions", "looked_up"),
  [("31b", 30.7, 0), ("26b_a4b", 25.2, 0), ("e2b", 2.28, 2.349)],
)
def test_published_models_have_their_published_size(name, billions, looked_up):
  config = model_preset(f"gemma4_{name}")
  config.validate()
  specs = models.param_specs(config)
  table = 0 if specs.per_layer is None else count(specs.per_layer.table)
  assert table == pytest.approx(looked_up * 1e9, rel=1e-3)
  assert count(specs) - table == pytest.approx(billions * 1e9, rel=5e-3)


@pytest.mark.parametrize("config", [SHARED, MIXED], ids=["shared", "mixed"])
def test_decoding_is_what_training_sees(config):
  invariances.check_decoding(config)


@BOTH
def test_packing_and_padding_do_not_matter(config):
  invariances.check_packing(config)


def test_slots_do_not_touch_each_other():
  invariances.check_slots(SHARED)


@BOTH
def test_the_gradient_is_the_slope_of_the_loss(config):
  invariances.check_gradient(config)


@pytest.mark.slow
def test_recomputing_layers_keeps_the_gradient():
  invariances.check_remat(with_pattern("Lr"))


def test_replayed_experts_are_used():
  params, rows = draw(MIXED, seed=1), pack([sequence()], [[0]], 17)
  free = score_tokens(params, MIXED, *rows)
  turned = (free.routing.experts + 1) % MIXED.num_experts
  replayed = score_tokens(params, MIXED, *rows, experts=turned)
  np.testing.assert_array_equal(replayed.routing.experts, turned)
  assert float(jnp.max(jnp.abs(replayed.log_probs - free.log_probs))) > 1e-2


def test_every_layer_reports_its_largest_scores():
  config = dataclasses.replace(SHARED, record_max_scores=True)
  out = forward(draw(config, seed=1), config, *pack([sequence()], [[0]], 17))
  assert out.max_scores.shape == (4, 4)
  assert len(np.unique(out.max_scores)) == 16


@pytest.mark.parametrize("pattern", ["rL", "lr", "LLr", "Lr*", "G-"])
def test_patterns_in_which_nobody_lends_first_are_refused(pattern):
  with pytest.raises(ConfigError, match="config.pattern"):
    with_pattern(pattern).validate()


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"gemma": None}, "config.pattern"),
    ({"rope_theta": None}, "config.rope_theta"),
    ({"gemma": Gemma4Config(window=0)}, "config.gemma.window"),
    ({"gemma": Gemma4Config(global_kv_heads=3)}, "config.gemma.global_kv_heads"),
    ({"gemma": Gemma4Config(global_rope_fraction=1.5)}, "config.gemma.global_rope_fraction"),
    ({"gemma": Gemma4Config(logit_softcap=0.0)}, "config.gemma.logit_softcap"),
  ],
)
def test_impossible_settings_are_refused(changes, field):
  with pytest.raises(ConfigError, match=field):
    dataclasses.replace(SHARED, **changes).validate()


def published(name, **changes):
  values = json.loads((GOLDEN / name / "config.json").read_text())
  return family.config_from_hf({**values, **changes})


def test_layer_types_become_characters():
  assert published("gemma4_e2b").pattern == "lLGrrR"
  assert published("gemma4_31b").pattern == "lglg"
  assert published("gemma4_moe").pattern == "xxX"
  without = {"layer_types": None, "num_hidden_layers": 8, "per_layer_config": None}
  assert published("gemma4_31b", **without).pattern == "lllllglg"


def test_a_text_model_inside_a_larger_config_is_found():
  values = json.loads((GOLDEN / "gemma4_e2b" / "config.json").read_text())
  inside = {"model_type": "gemma4", "dtype": "bfloat16", "text_config": values, "vision_config": {}}
  assert family.config_from_hf({**inside}) == family.config_from_hf(values)
  del values["dtype"]
  assert family.config_from_hf(inside).param_dtype == "bfloat16"


@pytest.mark.parametrize(
  ("name", "changes", "said"),
  [
    ("gemma4_e2b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma4_e2b", {"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input"),
    ("gemma4_e2b", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    ("gemma4_e2b", {"enable_moe_block": True}, "enable_moe_block"),
    ("gemma4_31b", {"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config"),
    ("gemma4_31b", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("gemma4_31b", {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
  ],
)
def test_a_checkpoint_that_asks_for_more_is_refused(name, changes, said):
  with pytest.raises(ConfigError, match=said):
    published(name, **changes)
