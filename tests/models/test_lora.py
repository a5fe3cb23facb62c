"""Adapters: where they go, that they start as nothing, and that beside a weight is as added in."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models import experts as experts_module
from agentjax.models.experts import Experts
from agentjax.models.linear import Adapted, linear
from agentjax.models.lora import Adapter, LoraConfig, adapt, init_lora, lora_specs, merge_lora
from tests.models import parity, rows
from tests.models.test_loop import two_pass
from tests.sharding.test_families_on_eight_devices import FAMILIES

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
  adapters = rows.filled_adapters(model, config)
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


_MODELS = {
  "hybrid": dataclasses.replace(rows.TINY, pattern="ME*-ME*-", latent_size=12),
  "loop": dataclasses.replace(
    rows.TINY, pattern="-*-*", loop=models.LoopConfig(prelude=1, coda=1, mean_depth=3)
  ),
  "two_pass": two_pass(rows.TINY),
  **FAMILIES,
}
_IDS = np.random.default_rng(1).integers(0, 32, (2, 20))


@pytest.mark.parametrize(
  "name", ["hybrid", *(pytest.param(n, marks=pytest.mark.slow) for n in _MODELS if n != "hybrid")]
)
def test_beside_the_weights_is_as_added_in_for_training_extension_and_steps(name):
  config = LoraConfig(rank=3, alpha=6.0)
  model = _MODELS[name]
  params, adapters = rows.draw(model, seed=1), rows.filled_adapters(model, config)
  beside = parity.compute(adapt(params, adapters, config), model, _IDS)
  merged = parity.compute(merge_lora(params, adapters, config), model, _IDS)
  plain = parity.compute(params, model, _IDS)
  for ours, wanted, without in zip(beside, merged, plain, strict=True):
    np.testing.assert_allclose(ours, wanted, atol=2e-4 * float(np.abs(wanted).max()))
    assert np.abs(without - wanted).max() > 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("mtp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fresh_adapters_leave_the_logits_as_they_are(mtp):
  model = dataclasses.replace(_STACKED, mtp=models.MtpConfig(depths=2) if mtp else None)
  config = LoraConfig(rank=4)
  params = rows.draw(model, seed=1)
  adapters = init_lora(models.param_specs(model), config, jax.random.key(0))
  at = np.ones_like(_IDS), np.broadcast_to(np.arange(20), _IDS.shape)

  @jax.jit
  def run(params):
    hidden = models.forward(params, model, _IDS, *at).hidden
    logits = models.compute_logits(params, model, hidden)
    return logits, models.mtp_scores(params, model, hidden, _IDS, *at).log_probs if mtp else None

  # They add exact zeros; the two programs may be fused, and so round, differently.
  found, expected = run(adapt(params, adapters, config)), run(params)
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
  jax.tree.map(close, found, expected)


def _loss(adapters, params, model, config, join):
  at = np.ones_like(_IDS), np.broadcast_to(np.arange(20), _IDS.shape)
  scores = models.score_tokens(join(params, adapters, config), model, _IDS, *at)
  return jnp.sum(jnp.cos(jnp.arange(40.0)).reshape(2, 20) * scores.log_probs)


# Experts by blocks of rows, and all on all tokens.
@pytest.mark.parametrize("block", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_sum_and_of_finite_differences(block):
  model = dataclasses.replace(
    rows.TINY, num_experts=8, expert_block=block, remat="dots", pattern="ME*-"
  )
  config = LoraConfig(rank=3, alpha=6.0)
  params, adapters = rows.draw(model, seed=1), rows.filled_adapters(model, config)
  gradient = jax.jit(jax.grad(_loss), static_argnums=(2, 3, 4))
  config = config.freeze()
  ours = gradient(adapters, params, model.freeze(), config, adapt)
  wanted = gradient(adapters, params, model.freeze(), config, merge_lora)
  for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(found, expected, atol=2e-4 * (1 + np.abs(expected).max()))
  rng = np.random.default_rng(5)
  way = jax.tree.map(lambda w: jnp.asarray(rng.standard_normal(w.shape), w.dtype), adapters)
  value = jax.jit(_loss, static_argnums=(2, 3, 4))
  up, down = (
    float(
      value(jax.tree.map(lambda w, d, h=h: w + h * d, adapters, way), params, model, config, adapt)
    )
    for h in (1e-3, -1e-3)
  )
  slope = sum(
    float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (ours, way)), strict=True)
  )
  assert (up - down) / 2e-3 == pytest.approx(slope, rel=0.02)


@pytest.mark.slow
def test_rows_sorted_by_expert_as_on_tpu_give_the_same_and_the_same_gradients():
  rng = np.random.default_rng(0)

  def weight(*shape):
    return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

  def adapted(size, into):
    return Adapted(weight(4, size, into), weight(4, size, 2), weight(4, 2, into), 1.5)

  experts = Experts(up=adapted(6, 5), gate=adapted(6, 5), down=adapted(5, 6), activation="swiglu")
  tokens, ids = weight(20, 6), jnp.asarray(rng.integers(0, 5, 20))

  def merged(v):
    return v.base + v.scale * jnp.matmul(v.a, v.b, precision="highest")

  def total(experts, run):
    return jnp.sum(jnp.cos(jnp.arange(120.0)).reshape(20, 6) * run(experts, tokens, ids))

  def sum_of(experts):
    parts = {n: merged(getattr(experts, n)) for n in ("up", "gate", "down")}
    return total(experts.replace(**parts), experts_module._ragged)

  wanted, slopes = jax.value_and_grad(sum_of)(experts)
  for run in (experts_module._ragged, lambda *v: experts_module._in_blocks(*v, block=3)):
    found, ours = jax.value_and_grad(total)(experts, run)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for name in ("up", "gate", "down"):
      for factor in ("a", "b"):
        got, expected = (getattr(getattr(g, name), factor) for g in (ours, slopes))
        np.testing.assert_allclose(got, expected, atol=1e-4)


def computed_shapes(jaxpr):
  """Shapes of all results of arithmetic in a program, loops and branches within included."""
  for equation in jaxpr.eqns:
    inner = [v for v in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr) if _is_jaxpr(v)]
    for each in inner:
      yield from computed_shapes(getattr(each, "jaxpr", each))
    if equation.primitive.name in _ARITHMETIC:
      yield from (v.aval.shape for v in equation.outvars)


_ARITHMETIC = {
  "dot_general",
  "ragged_dot_general",
  "add",
  "add_any",
  "mul",
  "scatter-add",
  "scatter_add",
}


def _is_adapted(value):
  return isinstance(value, Adapted)


def _is_jaxpr(value):
  return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "block"), [("none", 2), ("block", 8)])
def test_nothing_of_the_size_of_a_frozen_weight_is_computed(remat, block):
  """Every dimension of the model differs, so that a shape tells what an array is."""
  model = dataclasses.replace(
    rows.TINY,
    d_model=24,
    d_mlp=44,
    num_experts=9,
    d_expert=15,
    d_shared_expert=17,
    expert_block=block,
    pattern="ME*-ME*-",
    remat=remat,
    vocab_size=37,
  )
  config = LoraConfig(rank=3)
  params, adapters = rows.draw(model, seed=1), rows.filled_adapters(model, config)
  frozen = set()
  adapted = jax.tree.leaves(adapt(params, adapters, config), is_leaf=_is_adapted)
  for weight in filter(_is_adapted, adapted):
    stack = 2 if weight.a.ndim + weight.b.ndim - 4 == weight.base.ndim else 1
    own = weight.shape[stack:]
    size = math.prod(weight.a.shape[stack:-1])
    flat = (size, math.prod(own) // size)
    for shape in (own, flat, flat[::-1]):
      frozen |= {(*lead, *shape) for lead in ((), (2,), (9,), (2, 9))}

  def computed(join):
    made = jax.make_jaxpr(jax.grad(_loss), static_argnums=(2, 3, 4))(
      adapters, params, model.freeze(), config.freeze(), join
    )
    return set(computed_shapes(made.jaxpr)) & frozen

  assert len(computed(merge_lora)) > 5
  assert not computed(adapt)


def test_an_adapted_weight_that_is_used_as_an_array_says_what_to_do():
  weight = Adapted(jnp.ones((3, 4)), jnp.ones((3, 2)), jnp.ones((2, 4)), 1.0)
  with pytest.raises(TypeError, match=r"linear\(x, weight\).*config\.lora\.targets"):
    jnp.ones((5, 3)) @ weight
  with pytest.raises(ValueError, match="first axes do not hold 4"):
    linear(jnp.ones((5, 4)), jnp.ones((3, 4)))
  with pytest.raises(ConfigError, match="matches no matrix"):
    _targets(LoraConfig(targets=("second_pass.weight",)), _MODELS["two_pass"])
