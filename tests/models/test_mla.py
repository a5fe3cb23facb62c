import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.model_families import youtu
from agentjax.config import ConfigError
from agentjax.models import mla as module
from agentjax.models.config import MlaConfig
from agentjax.models.presets import model_preset
from agentjax.models.spec import count
from tests.models import invariances
from tests.models.rows import draw

CONFIG = models.ModelConfig(
  vocab_size=41,
  d_model=24,
  pattern="A-A-",
  num_heads=4,
  rope_theta=1e4,
  mla=MlaConfig(query_lora=16, kv_lora=12, nope_dim=6, rope_dim=4, value_dim=10),
  attention_block=8,
  d_mlp=40,
  mlp_activation="swiglu",
  logits_chunk=7,
)
DIRECT = dataclasses.replace(CONFIG, mla=dataclasses.replace(CONFIG.mla, query_lora=None))
ALIGNED = dataclasses.replace(
  CONFIG, mla=dataclasses.replace(CONFIG.mla, align_variance=True, interleaved=False)
)


def weights(config):
  """Of the first block alone."""
  return jax.tree.map(lambda w: w[0], draw(config, seed=0).groups[0][0].mixer)


def inputs(time, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal((2, time, CONFIG.d_model)), jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def attend(params, x, config, start=0):
  positions = jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2])
  return module.mla(
    params, x, config, segment_ids=jnp.ones(x.shape[:2], jnp.int32), positions=positions
  )[0]


@pytest.mark.parametrize("config", [CONFIG, DIRECT, ALIGNED], ids=["narrow", "direct", "aligned"])
def test_absorbed_decoding_equals_attention_over_all_heads(config):
  params, x = weights(config), inputs(11)
  wanted = attend(params, x, config)
  cache = module.init_latent_cache(config, 2, 12)
  rows = jnp.arange(2)
  positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
  counts = jnp.array([8, 5])
  extend = jax.jit(module.mla_extend, static_argnums=3)
  step = jax.jit(module.mla_step, static_argnums=3)
  out, cache = extend(
    params, x[:, :8], cache, config, rows=rows, positions=positions, counts=counts
  )
  np.testing.assert_allclose(out[0], wanted[0, :8], atol=1e-5)
  np.testing.assert_allclose(out[1, :5], wanted[1, :5], atol=1e-5)
  lengths = counts
  for _ in range(3):
    token = jnp.take_along_axis(x, lengths[:, None, None], axis=1)[:, 0]
    out, cache = step(params, token, cache, config, lengths=lengths, active=jnp.ones(2, bool))
    expected = jnp.take_along_axis(wanted, lengths[:, None, None], axis=1)[:, 0]
    np.testing.assert_allclose(out, expected, atol=1e-5)
    lengths = lengths + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slot_keeps_the_latent_and_one_rotated_key_a_token(dtype):
  config = dataclasses.replace(model_preset("youtu_llm_2b"), compute_dtype=dtype)
  cache = jax.eval_shape(functools.partial(models.init_cache, config, 3, 50))
  held = sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(cache.blocks))
  assert held / (3 * 50) == 576 * jnp.dtype(dtype).itemsize * 32


def test_the_published_youtu_llm_has_1_96_billion_parameters():
  assert count(models.param_specs(model_preset("youtu_llm_2b"))) == 1_961_560_064


def test_only_distances_between_tokens_matter():
  params, x = weights(CONFIG), inputs(9)
  np.testing.assert_allclose(
    attend(params, x, CONFIG, start=23), attend(params, x, CONFIG), atol=1e-5
  )


def test_the_order_of_past_tokens_matters():
  params, x = weights(CONFIG), inputs(9)
  shuffled = x.at[:, :8].set(x[:, 7::-1])
  apart = attend(params, shuffled, CONFIG)[:, -1] - attend(params, x, CONFIG)[:, -1]
  assert float(jnp.max(jnp.abs(apart))) > 1e-3


def test_aligned_variance_is_a_factor_on_queries_and_latent():
  sizes = CONFIG.mla
  aligned = dataclasses.replace(CONFIG, mla=dataclasses.replace(sizes, align_variance=True))
  params, x = weights(CONFIG), inputs(9)
  on_query = (CONFIG.d_model / sizes.query_lora) ** 0.5
  scaled = params.replace(
    query_nope=params.query_nope * on_query,
    query_rope=params.query_rope * on_query,
    latent_norm=params.latent_norm * (CONFIG.d_model / sizes.kv_lora) ** 0.5,
  )
  np.testing.assert_allclose(attend(params, x, aligned), attend(scaled, x, CONFIG), atol=1e-5)
  assert float(jnp.max(jnp.abs(attend(params, x, aligned) - attend(params, x, CONFIG)))) > 1e-2


def test_the_largest_score_is_that_of_the_keys_of_each_head():
  config = dataclasses.replace(CONFIG, record_max_scores=True)
  params, x = weights(config), inputs(9)
  positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
  ones = jnp.ones((2, 9), jnp.int32)
  run = jax.jit(module.mla, static_argnums=2)
  _, top = run(params, x, config, segment_ids=ones, positions=positions)
  project = jax.jit(module._project, static_argnums=2)
  nope, rope, latent, shared = project(params, x, config, positions)
  key = jnp.einsum("btl,lhn->bthn", latent, params.key_up)
  scores = jnp.einsum("bqhn,bkhn->bhqk", nope, key)
  scores += jnp.einsum("bqhr,bkr->bhqk", rope, shared[:, :, 0])
  scores = jnp.where(jnp.tril(jnp.ones((9, 9), bool)), scores * 10**-0.5, -jnp.inf)
  np.testing.assert_allclose(top, jnp.max(scores, axis=(0, 2, 3)), rtol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["narrow", "direct"])
def test_decoding_is_what_training_sees(config):
  invariances.check_decoding(config)


def test_packing_and_padding_do_not_matter():
  invariances.check_packing(ALIGNED)


def test_slots_do_not_touch_each_other():
  invariances.check_slots(CONFIG)


def test_the_gradient_is_the_slope_of_the_loss():
  invariances.check_gradient(ALIGNED)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"mla": None}, "config.mla"),
    ({"rope_theta": None}, "config.mla"),
    ({"mla": MlaConfig(rope_dim=7)}, "config.mla.rope_dim"),
    ({"mla": MlaConfig(kv_lora=0)}, "config.mla.kv_lora"),
    ({"mla": MlaConfig(query_lora=0)}, "config.mla.query_lora"),
  ],
)
def test_impossible_widths_are_refused(changes, field):
  with pytest.raises(ConfigError, match=field):
    dataclasses.replace(CONFIG, **changes).validate()


def test_a_config_with_latent_attention_survives_json():
  plain = json.loads(json.dumps(DIRECT.to_dict()))
  assert models.ModelConfig.from_dict(plain) == DIRECT


@pytest.mark.parametrize(
  "key, value",
  [
    ("attention_bias", True),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    ("num_key_value_heads", 2),
  ],
)
def test_a_checkpoint_that_asks_for_more_is_refused(key, value):
  folder = pathlib.Path(__file__).parents[1] / "golden" / "hf" / "youtu"
  values = json.loads((folder / "config.json").read_text())
  with pytest.raises(ConfigError, match=key.removesuffix("_parameters")):
    youtu.config_from_hf({**values, key: value})
