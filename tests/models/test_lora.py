"""Adapters: where they go, that they start as nothing, and that merging adds them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models.lora import Adapter, LoraConfig, init_lora, lora_specs, merge_lora
from agentjax.models.spec import is_spec
from tests.models import rows

_STACKED = dataclasses.replace(rows.TINY, pattern="ME*-ME*-")


def _targets(config: LoraConfig, model: models.ModelConfig = rows.TINY) -> dict[str, Adapter]:
  tree = lora_specs(models.param_specs(model), config)
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda v: isinstance(v, Adapter))
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def test_adapters_have_the_shape_and_the_axes_of_their_array_with_a_rank_between():
  adapters = _targets(LoraConfig(rank=3), _STACKED)
  shapes = {
    path.split(".", 3)[-1]: (a.a.shape, a.a.axes, a.b.shape, a.b.axes)
    for path, a in adapters.items()
  }
  assert shapes["mixer.query"] == (
    (2, 24, 3),
    ("layers", "embed", None),
    (2, 3, 4, 8),
    ("layers", None, "heads", "head_dim"),
  )
  query = "groups.0.2.mixer."
  out = adapters[f"{query}out"]
  assert out.a.shape == (2, 4, 8, 3) and out.b.shape == (2, 3, 24)
  up = shapes["mixer.expert_up"]
  assert up[0] == (2, 4, 24, 3) and up[2] == (2, 4, 3, 16)
  assert up[3] == ("layers", "experts", None, "expert_mlp")
  assert not any("norm" in path or "router" in path or "embedding" in path for path in adapters)


def test_patterns_choose_by_path_and_a_misspelt_one_lists_what_is_near():
  chosen = _targets(LoraConfig(targets=("*.mixer.query", "groups.0.3.*")))
  assert set(chosen) == {"groups.0.2.mixer.query", "groups.0.3.mixer.up", "groups.0.3.mixer.down"}
  with pytest.raises(
    ConfigError, match=r"'\*\.mixer\.qeury'.*nearest are groups\.0\.2\.mixer\.query"
  ):
    _targets(LoraConfig(targets=("*.mixer.qeury",)))
  with pytest.raises(ConfigError, match="matches no matrix"):
    _targets(LoraConfig(targets=("*norm",)))


def test_fresh_adapters_change_no_bit_of_the_parameters():
  params = rows.draw(_STACKED, seed=1)
  config = LoraConfig(rank=4)
  adapters = init_lora(models.param_specs(_STACKED), config, jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, merge_lora(params, adapters, config), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_matrix_gets_the_scaled_product_of_its_own_factors(dtype):
  model = dataclasses.replace(_STACKED, param_dtype=dtype)
  params = rows.draw(model, seed=1)
  config = LoraConfig(rank=4, alpha=6.0)
  specs = lora_specs(models.param_specs(model), config)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda s: jnp.asarray(0.1 * rng.standard_normal(s.shape), s.dtype), specs, is_leaf=is_spec
  )
  merged = merge_lora(params, adapters, config)
  products = (
    (2, "query", "ler,lrhd->lehd"),
    (2, "out", "lhdr,lre->lhde"),
    (1, "expert_down", "lxir,lxre->lxie"),
  )
  for block, name, equation in products:
    base, new, pair = (
      getattr(tree.groups[0][block].mixer, name) for tree in (params, merged, adapters)
    )
    expected = base.astype(jnp.float32) + 1.5 * np.einsum(equation, pair.a, pair.b)
    assert new.dtype == base.dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-7}
    np.testing.assert_allclose(new.astype(jnp.float32), expected, **tolerance)


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("alpha", 0.0), ("targets", ())])
def test_impossible_settings_name_the_field(field, value):
  with pytest.raises(ConfigError, match=rf"config\.lora\.{field}="):
    LoraConfig(**{field: value}).validate()
