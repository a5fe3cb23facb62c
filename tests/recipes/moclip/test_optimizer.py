"""MoClip: what the angle cap keeps, the bounded update, and its way through a config."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.models import ParamSpec
from agentjax.recipes.moclip.optimizer import MoClipConfig, cap_angle, scale_by_moclip
from agentjax.training.optimizer import OptimizerConfig, build_optimizer


def _degrees(a, b):
  a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
  cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
  return np.degrees(np.arccos(np.clip(cosine, -1, 1)))


def test_a_gradient_is_turned_to_the_cap_as_worked_out_by_hand():
  gradient, momentum = jnp.array([1.0, 2.0, -2.0]), jnp.array([2.0, 0.5, 0.5])
  turned = cap_angle(gradient, momentum, 45.0)
  # The same plane rotation in float64: the angle before is 71.683 degrees.
  np.testing.assert_allclose(turned, [2.082761, 1.824169, -1.155212], atol=1e-6)
  np.testing.assert_array_equal(cap_angle(gradient, momentum, 72.0), gradient)


@settings(max_examples=25, deadline=None)
@given(
  seed=st.integers(0, 10**6), cap=st.sampled_from([10.0, 90.0, 150.0]), size=st.integers(-9, 9)
)
def test_the_norm_stays_and_the_angle_is_never_above_the_cap(seed, cap, size):
  rng = np.random.default_rng(seed)
  gradient, momentum = (jnp.asarray(rng.standard_normal(12), jnp.float32) for _ in range(2))
  gradient *= 10.0**size
  turned = cap_angle(gradient, momentum, cap)
  np.testing.assert_allclose(np.linalg.norm(turned), np.linalg.norm(gradient), rtol=1e-5)
  assert _degrees(turned, momentum) <= cap + 0.01
  if _degrees(gradient, momentum) < cap - 0.01:
    np.testing.assert_array_equal(turned, gradient)


@pytest.mark.parametrize(
  "gradient,momentum",
  [
    ([1.0, -2.0], [0.0, 0.0]),
    ([0.0, 0.0], [1.0, 2.0]),
    ([-1.0, -2.0], [2.0, 4.0]),
    ([-3.0], [1.0]),
  ],
)
def test_without_a_plane_to_turn_in_the_gradient_is_left_alone(gradient, momentum):
  given_gradient = jnp.array(gradient)
  turned = cap_angle(given_gradient, jnp.array(momentum), 45.0)
  np.testing.assert_array_equal(turned, given_gradient)


def test_tensors_that_are_stacked_are_turned_each_on_its_own():
  rng = np.random.default_rng(0)
  gradient, momentum = (jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32) for _ in range(2))
  together = cap_angle(gradient, momentum, 60.0, stack=1)
  for i in range(2):
    np.testing.assert_allclose(together[i], cap_angle(gradient[i], momentum[i], 60.0), atol=1e-6)


def test_a_reversal_is_held_back_where_adam_follows_it():
  # Momentum along one axis, then a gradient that turns back sharply.
  first, second = jnp.array([1.0, 0.1]), jnp.array([-4.0, 0.1])

  def moved(optimizer):
    state = optimizer.init(jnp.zeros(2))
    _, state = optimizer.update(first, state)
    changes, _ = optimizer.update(second, state)
    return np.asarray(changes)

  assert moved(scale_by_moclip(max_angle=None))[0] < 0
  assert moved(optax.scale_by_adam())[0] < 0
  assert moved(scale_by_moclip(max_angle=45.0))[0] > 0


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1.0, 1e12])
def test_the_update_is_bounded_and_blind_to_the_size_of_gradients(magnitude):
  rng = np.random.default_rng(0)
  optimizer = scale_by_moclip(max_angle=45.0)
  state = optimizer.init(jnp.zeros(6))
  update = jax.jit(optimizer.update)
  reference = scale_by_moclip(max_angle=45.0)
  known = reference.init(jnp.zeros(6))
  for _ in range(4):
    gradient = jnp.asarray(rng.standard_normal(6), jnp.float32)
    changes, state = update(gradient * magnitude, state)
    expected, known = reference.update(gradient, known)
    assert np.all(np.abs(changes) <= 2.0)  # 4/pi times pi/2
    if magnitude >= 1e-12:  # below, the square of a gradient is no float32
      np.testing.assert_allclose(changes, expected, rtol=1e-4, atol=1e-5)


_SPECS = {
  "query": ParamSpec((2, 4, 4), ("layers", "embed", None)),
  "norm": ParamSpec((4,), (None,), decayed=False),
  "bias": ParamSpec((3,), (None,), trained=False),
}


def test_a_config_selects_it_for_every_array_that_is_trained():
  config = OptimizerConfig(
    direction=MoClipConfig(max_angle=30.0), learning_rate=0.1, weight_decay=0.5, clip_norm=None
  )
  optimizer = build_optimizer(config, 10, _SPECS)
  rng = np.random.default_rng(1)
  params = {k: jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for k, s in _SPECS.items()}
  history = [
    {k: jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for k, s in _SPECS.items()}
    for _ in range(2)
  ]

  def run(params, history):
    state = optimizer.init(params)
    for grads in history:
      changes, state = optimizer.update(grads, state, params)
    return changes

  whole = run(params, history)
  assert not np.any(whole["bias"])
  direct = scale_by_moclip(max_angle=30.0)
  state = direct.init(params["query"][1])
  for grads in history:
    expected, state = direct.update(grads["query"][1], state)
  np.testing.assert_allclose(
    whole["query"][1], -0.1 * (expected + 0.5 * params["query"][1]), rtol=1e-5, atol=1e-6
  )


@pytest.mark.slow
def test_a_sharded_tree_moves_as_a_whole_one():
  flags = "--xla_force_host_platform_device_count=2"
  root = str(pathlib.Path(__file__).resolve().parents[3])
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": root}
  subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=300)


def _compare_on_two_devices():
  mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  rng = np.random.default_rng(2)
  history = [jnp.asarray(rng.standard_normal((3, 4, 6)), jnp.float32) for _ in range(3)]
  optimizer = scale_by_moclip(max_angle=60.0, stack=1)

  def run(history):
    state = optimizer.init(history[0])
    for gradient in history:
      changes, state = optimizer.update(gradient, state)
    return changes

  place = jax.sharding.NamedSharding(mesh, jax.P(None, None, "fsdp"))
  split = jax.jit(run)([jax.device_put(g, place) for g in history])
  assert len(split.sharding.device_set) == 2
  np.testing.assert_allclose(split, run(history), rtol=1e-5, atol=1e-6)


def test_an_impossible_cap_names_its_field():
  with pytest.raises(ConfigError, match=r"config\.optimizer\.direction\.max_angle=180"):
    OptimizerConfig(direction=MoClipConfig(max_angle=180.0)).validate("config.optimizer")


if __name__ == "__main__":
  _compare_on_two_devices()
