"""Schedules, decay masks and the guard against non-finite gradients."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax.config import ConfigError
from agentjax.training.optimizer import (
  OptimizerConfig,
  bad_steps,
  build_optimizer,
  learning_rate_schedule,
)


def test_schedules_warm_up_from_above_zero_and_end_at_the_final_fraction():
  config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=4, final_fraction=0.1)
  rates = np.array([learning_rate_schedule(config, 20)(i) for i in range(21)])
  np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(rates[20], 0.1, rtol=1e-6)
  assert (np.diff(rates[4:]) <= 0).all()


def test_only_what_the_mask_says_is_decayed():
  config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
  params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
  optimizer = build_optimizer(config, 10, {"matrix": True, "vector": False})
  changes, _ = optimizer.update(
    {"matrix": jnp.zeros((2, 2)), "vector": jnp.zeros(2)}, optimizer.init(params), params
  )
  moved = optax.apply_updates(params, changes)
  np.testing.assert_allclose(moved["vector"], 1.0)
  np.testing.assert_allclose(moved["matrix"], 0.95, rtol=1e-6)


def test_a_nan_gradient_moves_nothing_and_is_counted():
  optimizer = build_optimizer(OptimizerConfig(), 10, {"w": True})
  params = {"w": jnp.ones((2, 2))}
  state = optimizer.init(params)
  for expected in (1, 2):
    changes, state = optimizer.update({"w": jnp.full((2, 2), jnp.nan)}, state, params)
    assert int(bad_steps(state)) == expected and not np.any(changes["w"])
  changes, state = optimizer.update({"w": jnp.ones((2, 2))}, state, params)
  assert int(bad_steps(state)) == 0 and np.all(changes["w"] != 0)


@pytest.mark.parametrize("field,value", [("learning_rate", 0.0), ("b1", 1.0), ("clip_norm", -1.0)])
def test_impossible_settings_name_the_field(field, value):
  with pytest.raises(ConfigError, match=rf"config\.optimizer\.{field}={value}"):
    OptimizerConfig(**{field: value}).validate()
