"""Value losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives.value_loss import (
  ValueLossConfig,
  bernoulli_value_loss,
  squared_value_loss,
)


def test_golden_bernoulli_loss_and_prompt_value_advantage():
  logits, outcomes = jnp.array([0.2, -1.0]), jnp.array([1.0, 0.0])
  np.testing.assert_allclose(bernoulli_value_loss(logits, outcomes).mean(), 0.4557, atol=1e-4)
  advantages = outcomes - jax.nn.sigmoid(logits)
  np.testing.assert_allclose(advantages, [0.450166, -0.268941], atol=1e-6)


def test_a_clipped_value_stops_only_when_it_runs_ahead():
  """Beyond the bound and still improving: no gradient. Beyond and worse: full gradient."""
  old, returns = jnp.zeros(3), jnp.array([1.0, 1.0, 1.0])
  values = jnp.array([0.1, 0.5, -0.5])
  gradient = jax.grad(lambda v: squared_value_loss(v, returns, old_values=old, clip=0.2).sum())(
    values
  )
  np.testing.assert_allclose(gradient, [-0.9, 0.0, -1.5], atol=1e-6)
  plain = jax.grad(lambda v: squared_value_loss(v, returns).sum())(values)
  np.testing.assert_allclose(plain, [-0.9, -0.5, -1.5], atol=1e-6)


def test_targets_get_no_gradient():
  for loss in (squared_value_loss, bernoulli_value_loss):
    gradient = jax.grad(lambda g, loss=loss: loss(jnp.ones(2), g).sum())(jnp.array([0.3, 0.6]))
    assert not np.any(gradient)


def test_clip_needs_old_values_and_a_positive_bound():
  with pytest.raises(ValueError, match="old_values"):
    squared_value_loss(jnp.ones(1), jnp.ones(1), clip=0.2)
  with pytest.raises(ConfigError, match=r"value_loss\.clip"):
    ValueLossConfig(clip=0.0).validate()
