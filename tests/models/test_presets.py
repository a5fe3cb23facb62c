"""Published architectures have the published numbers of parameters."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from agentjax.config import ConfigError
from agentjax.models import ModelConfig, count, init, model_preset, model_presets, param_specs
from agentjax.models.spec import is_spec

# Exact where the checkpoint's size is published, else as the reports round.
TOTALS = {
  "nemotron3_nano_30b_a3b": 31_577_940_288,  # 31.6B
  "nemotron3_super_120b_a12b": 120_668_707_840,  # 120.6B without prediction heads
  "nemotron3_ultra_550b_a55b": 549_308_993_536,  # 550B
  "nemotron3_nano_4b": 3_973_556_832,
  "llama3_1_8b": 8_030_261_248,
  "qwen2_5_1_5b": 1_543_714_304,
  "qwen2_5_7b": 7_615_616_512,
  "qwen3_0_6b": 596_049_920,
  "qwen3_8b": 8_190_735_360,
  # 30,532,122,624 and a router bias that the checkpoint lacks.
  "qwen3_30b_a3b": 30_532_122_624 + 48 * 128,
  "mamba2_2_7b": 2_702_599_680,
  # Those of its code, and weights of the query and key norms, which that lacks.
  "parcae_140m": 144_323_136 + 6 * 256,
  "parcae_370m": 388_003_328 + 12 * 256,
  "parcae_770m": 776_655_680 + 18 * 256,
  "parcae_1_3b": 1_338_591_744 + 24 * 256,
}


def count_active(config: ModelConfig, *, embedding: bool = True) -> int:
  """Number of parameters that one token meets: of the routed experts those that it visits.

  Args:
    config: of the model; prediction heads (``config.mtp``) are counted where they are set.
    embedding: count the input embedding. A tied one is always counted, as output projection.
  """
  specs = param_specs(config)
  visited = config.experts_per_token / config.num_experts
  total = sum(
    math.prod(spec.shape) * (visited if "experts" in spec.axes else 1)
    for spec in jax.tree.leaves(specs, is_leaf=is_spec)
  )
  if not embedding and not config.tie_embeddings:
    total -= math.prod(specs.embedding.shape)
  return round(total)


@pytest.mark.parametrize("name", TOTALS)
def test_published_models_have_their_number_of_parameters(name):
  assert count(param_specs(model_preset(name))) == TOTALS[name]


@pytest.mark.parametrize(
  ("name", "said"), [("140m", 140e6), ("370m", 370e6), ("770m", 770e6), ("1_3b", 1.3e9)]
)
def test_parcae_has_the_sizes_of_its_table(name, said):
  """About a third of a model are value embeddings; without them 1.3B would be 0.73B."""
  config = model_preset(f"parcae_{name}")
  made = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
  assert sum(v.size for v in jax.tree.leaves(made)) == pytest.approx(said, rel=0.05)
  layers = {"140m": 2, "370m": 4, "770m": 6, "1_3b": 8}[name]
  assert [len(section) for section in config.sections] == [2 * layers] * 3
  assert all(section == "*-V-" * (layers // 2) for section in config.sections)
  assert config.loop.mean_depth == 8


@pytest.mark.parametrize(
  ("name", "without_embedding", "with_embedding"),
  [
    ("nemotron3_nano_30b_a3b", 3.2e9, 3.6e9),
    # The report says 12.1e9 without embeddings; its own dimensions give 12.23e9.
    ("nemotron3_super_120b_a12b", 12.2e9, 12.7e9),
    ("nemotron3_ultra_550b_a55b", 55e9, 56e9),
    ("qwen3_30b_a3b", 3.0e9, 3.3e9),
  ],
)
def test_published_mixtures_have_their_number_of_active_parameters(
  name, without_embedding, with_embedding
):
  config = model_preset(name)
  assert count_active(config, embedding=False) == pytest.approx(without_embedding, rel=0.02)
  assert count_active(config) == pytest.approx(with_embedding, rel=0.02)


@pytest.mark.parametrize("name", model_presets())
def test_presets_are_valid_and_copies(name):
  config = model_preset(name)
  config.validate()
  config.vocab_size += 1
  assert model_preset(name) != config


def test_a_dense_model_is_all_active():
  config = model_preset("qwen3_8b")
  assert count_active(config) == count(param_specs(config))
  assert count_active(dataclasses.replace(config, pattern="*-")) < count_active(config)


def test_an_unknown_preset_names_the_known_ones():
  with pytest.raises(ConfigError, match=r"'gpt5'.*qwen3_8b"):
    model_preset("gpt5")
