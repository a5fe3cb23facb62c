"""Schedules, decay, Muon on every kind of matrix, and the guard against non-finite gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models import ParamSpec
from agentjax.models.matrices import matrix_axes
from agentjax.models.spec import is_spec
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.training.optimizer import (
  DirectionConfig,
  OptimizerConfig,
  bad_steps,
  build_optimizer,
  learning_rate_schedule,
)
from agentjax.training.state import StateSpec, network_specs
from tests.models.rows import TINY


def test_schedules_warm_up_from_above_zero_and_end_at_the_final_fraction():
  config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=4, final_fraction=0.1)
  rates = np.array([learning_rate_schedule(config, 20)(i) for i in range(21)])
  np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(rates[20], 0.1, rtol=1e-6)
  assert (np.diff(rates[4:]) <= 0).all()


_MATRIX = ParamSpec((2, 2), ("embed", "mlp"))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_what_the_specs_say_is_decayed(name):
  config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5)
  params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
  specs = {"matrix": _MATRIX, "vector": ParamSpec((2,), (None,), decayed=False)}
  optimizer = build_optimizer(config, 10, specs)
  changes, _ = optimizer.update(
    {"matrix": jnp.zeros((2, 2)), "vector": jnp.zeros(2)}, optimizer.init(params), params
  )
  moved = optax.apply_updates(params, changes)
  np.testing.assert_allclose(moved["vector"], 1.0)
  np.testing.assert_allclose(moved["matrix"], 0.95, rtol=1e-6)


def test_what_is_not_trained_has_no_moments_and_stays():
  specs = {"w": _MATRIX, "bias": ParamSpec((3,), (None,), trained=False)}
  params = {"w": jnp.ones((2, 2)), "bias": jnp.ones(3)}
  optimizer = build_optimizer(OptimizerConfig(weight_decay=0.5), 10, specs)
  state = optimizer.init(params)
  assert not [leaf for leaf in jax.tree.leaves(state) if jnp.shape(leaf) == (3,)]
  changes, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
  assert not np.any(changes["bias"]) and np.all(changes["w"] != 0)


def test_a_nan_gradient_moves_nothing_and_is_counted():
  optimizer = build_optimizer(OptimizerConfig(), 10, {"w": _MATRIX})
  params = {"w": jnp.ones((2, 2))}
  state = optimizer.init(params)
  for expected in (1, 2):
    changes, state = optimizer.update({"w": jnp.full((2, 2), jnp.nan)}, state, params)
    assert int(bad_steps(state)) == expected and not np.any(changes["w"])
  changes, state = optimizer.update({"w": jnp.ones((2, 2))}, state, params)
  assert int(bad_steps(state)) == 0 and np.all(changes["w"] != 0)


@pytest.mark.parametrize(
  "field,value",
  [("learning_rate", 0.0), ("b1", 1.0), ("clip_norm", -1.0), ("momentum", 1.0), ("update_rms", 0)],
)
def test_impossible_settings_name_the_field(field, value):
  with pytest.raises(ConfigError, match=rf"config\.optimizer\.{field}={value}"):
    OptimizerConfig(**{field: value}).validate("config.optimizer")


def _named(tree):
  """Leaves by path, specs or arrays."""
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def test_matrices_are_the_projections_of_all_blocks_and_nothing_else():
  specs = _named(models.param_specs(TINY))
  found = {path.split(".", 3)[-1]: matrix_axes(s) for path, s in specs.items()}
  shapes = {
    name: tuple(
      tuple(next(s for p, s in specs.items() if p.endswith(name)).shape[i] for i in part)
      for part in (axes.stack, axes.inputs, axes.outputs)
    )
    for name, axes in found.items()
    if axes is not None
  }
  assert shapes == {
    "mixer.gate": ((1,), (24,), (4, 8)),
    "mixer.x": ((1,), (24,), (4, 8)),
    "mixer.b": ((1,), (24,), (2, 8)),
    "mixer.c": ((1,), (24,), (2, 8)),
    "mixer.step": ((1,), (24,), (4,)),
    "mixer.out": ((1,), (4, 8), (24,)),
    "mixer.expert_up": ((1, 4), (24,), (16,)),
    "mixer.expert_down": ((1, 4), (16,), (24,)),
    "mixer.shared.up": ((1,), (24,), (16,)),
    "mixer.shared.down": ((1,), (16,), (24,)),
    "mixer.query": ((1,), (24,), (4, 8)),
    "mixer.key": ((1,), (24,), (2, 8)),
    "mixer.value": ((1,), (24,), (2, 8)),
    "mixer.up": ((1,), (24,), (40,)),
    "mixer.down": ((1,), (40,), (24,)),
  }


_STACKED = {
  "query": ParamSpec((2, 6, 2, 4), ("layers", "embed", "heads", "head_dim")),
  "experts": ParamSpec((2, 3, 6, 5), ("layers", "experts", "embed", "expert_mlp")),
  "embedding": ParamSpec((7, 6), ("vocab", "embed")),
  "router": ParamSpec((2, 6, 3), ("layers", "embed", None), wide=True),
  "taps": ParamSpec((2, 4, 6), ("layers", None, "mamba_heads"), decayed=False),
}


def _two_updates(config, specs, params, seed=0):
  """The second update: momentum and bias correction have their say."""
  optimizer = build_optimizer(config, 10, specs)
  state = optimizer.init(params)
  rng = np.random.default_rng(seed)
  for _ in range(2):
    grads = {k: jnp.asarray(rng.standard_normal(v.shape), jnp.float32) for k, v in params.items()}
    changes, state = optimizer.update(grads, state, params)
  return changes, grads


@pytest.mark.parametrize("update_rms", [0.2, None])
def test_each_layer_and_each_expert_is_orthogonalised_on_its_own(update_rms):
  config = OptimizerConfig(name="muon", learning_rate=1.0, clip_norm=None, update_rms=update_rms)
  params = {k: jnp.zeros(s.shape) for k, s in _STACKED.items()}
  changes, _ = _two_updates(config, _STACKED, params)

  # The same momentum by hand: of a slice, orthogonalised by optax as a plain matrix.
  rng = np.random.default_rng(0)
  history = [
    {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in params.items()}
    for _ in range(2)
  ]
  for name, width in (("query", 8), ("experts", 5)):
    for place in np.ndindex(_STACKED[name].shape[: 1 + (name == "experts")]):
      first, second = (h[name][place].reshape(6, width) for h in history)
      momentum = 0.95 * first + second
      coefficients = (3.4445, -4.7750, 2.0315)
      x = momentum / np.linalg.norm(momentum)
      x = x.T if x.shape[0] > x.shape[1] else x
      for _ in range(5):
        gram = x @ x.T
        x = coefficients[0] * x + (coefficients[1] * gram + coefficients[2] * gram @ gram) @ x
      x = x.T if x.shape != (6, width) else x
      scale = max(1.0, width / 6) ** 0.5 if update_rms is None else 0.2 * max(6, width) ** 0.5
      got = -np.asarray(changes[name][place]).reshape(6, width)
      np.testing.assert_allclose(got, scale * x, atol=2e-5)
      # Nearly orthogonal: all singular values near one, for every slice.
      values = np.linalg.svd(got / scale, compute_uv=False)
      assert 0.5 < values.min() and values.max() < 1.3


def test_what_is_no_matrix_moves_as_under_adam():
  params = {k: jnp.ones(s.shape) for k, s in _STACKED.items()}
  muon, _ = _two_updates(OptimizerConfig(name="muon", clip_norm=None), _STACKED, params)
  adam, _ = _two_updates(OptimizerConfig(clip_norm=None), _STACKED, params)
  for name in ("embedding", "router", "taps"):
    np.testing.assert_array_equal(muon[name], adam[name])
  for name in ("query", "experts"):
    assert np.abs(muon[name] - adam[name]).max() > 1e-5


def test_momentum_is_placed_as_its_matrix_and_adam_keeps_nothing_for_it():
  specs = network_specs(TINY, critic=True)
  optimizer = build_optimizer(OptimizerConfig(name="muon"), 10, specs)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  placed = StateSpec(TINY, optimizer, mesh, critic=True).placed
  parts = placed.networks["policy"].opt_state.inner_state[1].inner_states
  momentum = parts["muon"].inner_state[0].mu
  moments = parts["adam"].inner_state.mu
  query = placed.weights.policy.groups[0][2].mixer.query
  assert momentum.policy.groups[0][2].mixer.query == query
  assert isinstance(moments.policy.groups[0][2].mixer.query, optax.MaskedNode)
  assert moments.policy.embedding == placed.weights.policy.embedding
  assert moments.value.weight == placed.weights.value.weight


@dataclasses.dataclass(unsafe_hash=True)
class SignConfig(DirectionConfig):
  """The sign of a gradient times ``size``."""

  size: float = 1.0

  def build(self, config, specs):
    return optax.stateless(lambda grads, _: jax.tree.map(lambda g: self.size * jnp.sign(g), grads))


def test_a_direction_of_your_own_moves_every_array_that_is_trained():
  specs = {
    "matrix": ParamSpec((2, 3), ("embed", "mlp")),
    "frozen": ParamSpec((3,), (None,), trained=False),
  }
  config = OptimizerConfig(
    name="muon", direction=SignConfig(2.0), learning_rate=0.1, clip_norm=None
  )
  optimizer = build_optimizer(config, 10, specs)
  params = {"matrix": jnp.ones((2, 3)), "frozen": jnp.ones(3)}
  grads = {"matrix": jnp.array([[1e-3, -5.0, 0.0]] * 2), "frozen": jnp.ones(3)}
  changes, _ = optimizer.update(grads, optimizer.init(params), params)
  np.testing.assert_allclose(changes["matrix"], [[-0.2, 0.2, 0.0]] * 2, rtol=1e-6)
  assert not np.any(changes["frozen"])
  saved = OptimizerConfig.from_dict(config.to_dict())
  assert saved == config and isinstance(saved.direction, SignConfig)
