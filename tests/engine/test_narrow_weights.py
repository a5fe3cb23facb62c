"""Weights of 8 bits in the lanes: what they round, and that nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine.slots import SlotEngine
from agentjax.models.lora import LoraConfig, adapt, init_lora
from agentjax.models.narrow import narrow_weight
from agentjax.models.spec import is_spec
from tests.engine.conftest import sizes
from tests.engine.test_slots import gap_to_trainer
from tests.sharding.test_engine_on_eight_devices import MODELS, played

_FEW = {("hybrid", "int8")}


def weights(config: models.ModelConfig):
  return jax.jit(functools.partial(models.init, config))(jax.random.key(0))


def rounded(config: models.ModelConfig, params, dtype: str):
  """Training parameters whose matrices in blocks are what 8 bits keep of them."""

  def one(path, spec, w):
    made = narrow_weight(spec, w, dtype, "float32") if path[0].name in ("groups", "mtp") else None
    return w if made is None else made.astype(w.dtype)

  specs = models.param_specs(config)
  return jax.tree_util.tree_map_with_path(one, specs, params, is_leaf=is_spec)


@pytest.mark.parametrize(
  ("name", "dtype"),
  [
    pytest.param(n, d, marks=() if (n, d) in _FEW else pytest.mark.slow)
    for n in MODELS
    for d in ("int8", "fp8")
  ],
)
def test_a_lane_samples_what_it_would_with_rounded_weights(name, dtype):
  config, params = MODELS[name], weights(MODELS[name])
  ids, log_probs, stats, _ = played(config, params, weight_dtype=dtype)
  expected, expected_log_probs, whole, _ = played(config, rounded(config, params, dtype))
  np.testing.assert_array_equal(ids, expected)
  np.testing.assert_allclose(log_probs, expected_log_probs, atol=2e-5)
  assert stats.published_bytes < whole.published_bytes


@pytest.mark.parametrize(("dtype", "most"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_a_number_is_off_by_a_share_of_the_largest_for_its_output(dtype, most):
  config = MODELS["dense"]
  specs = jax.tree.leaves(models.param_specs(config).groups, is_leaf=is_spec)
  spec = next(s for s in specs if len(s.shape) == 3 and s.axes[-1] == "embed")
  w = jax.random.normal(jax.random.key(1), spec.shape)  # [layers, hidden, embed]
  made = narrow_weight(spec, w.at[:, :, 0].set(0.0), dtype, "float32")
  wide = made.astype(jnp.float32)
  assert made.numbers.dtype.itemsize == 1 and made.scales.shape == (*w.shape[:1], 1, w.shape[2])
  largest = jnp.max(jnp.abs(w), axis=1, keepdims=True)
  assert np.max(np.abs(wide - w)[:, :, 1:] / largest[:, :, 1:]) <= most * 1.001
  assert not np.any(wide[:, :, 0])


def test_half_of_bfloat16_and_a_measured_gap_to_the_trainer():
  config = models.ModelConfig(
    vocab_size=48, d_model=64, pattern="*-*-", num_heads=4, num_kv_heads=2, head_dim=16,
    rope_theta=100.0, d_mlp=128,
  )  # fmt: skip
  params, gaps, held = models.init(config, jax.random.key(0)), {}, {}
  for name in (None, "int8", "fp8"):
    engine = SlotEngine(config, sizes(weight_dtype=name))
    engine.publish(params, 0)
    held[name] = sum(w.nbytes for w in jax.tree.leaves(engine.weights.params.blocks))
    gaps[name] = gap_to_trainer(engine, params)
  assert gaps[None] < 2e-5 < gaps["int8"] < gaps["fp8"] < 0.3 and gaps["int8"] < 0.05
  assert held["int8"] == held["fp8"] < 0.3 * held[None]  # which is float32


@pytest.mark.slow
def test_adapters_are_applied_beside_narrow_weights():
  config = MODELS["hybrid"]
  lora = LoraConfig(rank=2)
  params = weights(config)
  drawn = init_lora(models.param_specs(config), lora, jax.random.key(1))
  factors = jax.tree.map(lambda w: w + 0.05 * jax.random.normal(jax.random.key(2), w.shape), drawn)
  ids, log_probs, *_ = played(config, adapt(params, factors, lora), weight_dtype="int8")
  expected = played(config, adapt(rounded(config, params, "int8"), factors, lora))
  np.testing.assert_array_equal(ids, expected[0])
  np.testing.assert_allclose(log_probs, expected[1], atol=2e-5)
  assert np.max(np.abs(played(config, params, weight_dtype="int8")[1][:5] - log_probs[:5])) > 1e-3


def test_exact_log_probs_refuse_them(model_config):
  config = dataclasses.replace(model_config, pattern="*-", exact_chunk=8)
  with pytest.raises(ConfigError, match=r"engine\.weight_dtype.*int8(.|\n)*exact log-probs"):
    SlotEngine(config, sizes(weight_dtype="int8"))
