import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from agentjax.models import ParamSpec
from agentjax.models.spec import is_spec


def test_adding_an_array_never_changes_another():
  spec = ParamSpec((3, 4), ("embed", None))
  key = jax.random.key(5)
  few = models.init_params({"b": spec, "d": spec}, key)
  more = models.init_params({"a": spec, "b": spec, "c": (spec, spec), "d": spec}, key)
  np.testing.assert_array_equal(few["b"], more["b"])
  np.testing.assert_array_equal(few["d"], more["d"])
  drawn = [np.asarray(v) for v in jax.tree.leaves(more)]
  assert all(not np.array_equal(v, w) for i, v in enumerate(drawn) for w in drawn[:i])


def test_specs_say_what_init_makes(tiny):
  specs = models.param_specs(tiny)
  made = jax.eval_shape(lambda key: models.init(tiny, key), jax.random.key(0))
  for found, wanted in zip(
    jax.tree.leaves(made), jax.tree.leaves(models.abstract(specs)), strict=True
  ):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
  assert models.count(specs) == sum(v.size for v in jax.tree.leaves(made))
  for spec in jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, ParamSpec)):
    assert len(spec.axes) == len(spec.shape)


def test_nemotron_3_nano_has_its_published_number_of_parameters():
  config = models.ModelConfig(
    vocab_size=131072,
    d_model=2688,
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    mamba_heads=64,
    mamba_head_dim=64,
    mamba_state=128,
    mamba_groups=8,
    num_experts=128,
    experts_per_token=6,
    d_expert=1856,
    d_shared_expert=3712,
  )
  config.validate()
  # 31.578 billion without the 23 * 128 router biases, which the published count leaves out.
  assert abs(models.count(models.param_specs(config)) / 1e9 - 31.578) < 1e-3


def test_mamba_steps_start_inside_their_range():
  spec = ParamSpec((4096,), (None,), init="step_bias", low=1e-3, high=1e-1)
  steps = jax.nn.softplus(models.init_params(spec, jax.random.key(0)))
  assert 9e-4 < jnp.min(steps) < 2e-3
  assert 5e-2 < jnp.max(steps) < 1.01e-1
  assert abs(jnp.median(jnp.log(steps)) - jnp.log(1e-2)) < 0.1


def test_norms_biases_and_the_router_bias_are_kept_from_decay(tiny):
  specs = models.param_specs(tiny)
  decayed = models.decay_mask(specs)
  trained = jax.tree.map(lambda spec: spec.trained, specs, is_leaf=is_spec)
  mamba, moe = decayed.groups[0][0], decayed.groups[0][1]
  assert not any((mamba.norm, mamba.mixer.decay_rate, mamba.mixer.step_bias, moe.mixer.router_bias))
  assert mamba.mixer.x and moe.mixer.expert_up and decayed.embedding
  untrained = [not leaf for leaf in jax.tree.leaves(trained)]
  assert sum(untrained) == 1 and not trained.groups[0][1].mixer.router_bias
