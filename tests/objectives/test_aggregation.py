"""Coefficients: what a token is worth in the loss of the whole batch."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.objectives.aggregation import token_coefficients

# Two sequences of 3 and 2 tokens, packed into one row with padding.
SEGMENTS = jnp.array([[1, 1, 1, 0, 2, 2, 0]])
WEIGHTS = jnp.array([[1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
LOG_PROBS = np.array([-0.5, -1.0, -2.0, 0, -0.3, -0.7, 0])
OLD = np.array([-0.9, -1.0, -1.5, 0, -0.2, -1.2, 0])
ADVANTAGES = np.array([1.0, 1.0, 1.0, 0, -0.5, -0.5, 0])


@pytest.mark.parametrize(
  "mode, constant, expected",
  [
    ("token_mean", None, -0.32195),
    ("sequence_mean_token_mean", None, -0.161894),
    ("sequence_mean_token_sum", None, -0.804876),
    ("constant", 3.0, -0.268292),
  ],
)
def test_golden_ppo_loss_of_every_mode(mode, constant, expected):
  ratio = np.exp(LOG_PROBS - OLD)
  per_token = -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 0.8, 1.28) * ADVANTAGES)
  # Two empty places for sequences change no denominator.
  coefficients = token_coefficients(WEIGHTS, SEGMENTS, 4, mode=mode, constant=constant)
  np.testing.assert_allclose(np.sum(coefficients * per_token), expected, atol=1e-6)


def test_a_sequence_without_weight_is_in_no_denominator():
  masked = WEIGHTS.at[0, 4:6].set(0)
  for mode in ("sequence_mean_token_mean", "sequence_mean_token_sum"):
    alone = token_coefficients(masked, SEGMENTS, 2, mode=mode)
    expected = 1 / 3 if mode == "sequence_mean_token_mean" else 1.0
    np.testing.assert_allclose(alone[0], [expected] * 3 + [0] * 4, rtol=1e-6)


@pytest.mark.parametrize(
  "mode, constant",
  [
    ("token_mean", None),
    ("sequence_mean_token_mean", None),
    ("sequence_mean_token_sum", None),
    ("constant", 5.0),
  ],
)
def test_a_batch_without_weight_gives_zeros(mode, constant):
  empty = token_coefficients(jnp.zeros_like(WEIGHTS), SEGMENTS, 2, mode=mode, constant=constant)
  np.testing.assert_array_equal(empty, np.zeros_like(WEIGHTS))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=7, max_size=7))
def test_means_have_coefficients_that_sum_to_one(weights):
  weights = jnp.asarray(weights)[None] * (SEGMENTS > 0)
  for mode in ("token_mean", "sequence_mean_token_mean"):
    total = float(token_coefficients(weights, SEGMENTS, 2, mode=mode).sum())
    np.testing.assert_allclose(total, 1.0 if float(weights.sum()) else 0.0, atol=1e-6)


def test_constant_goes_with_its_mode_only():
  with pytest.raises(ValueError, match="constant"):
    token_coefficients(WEIGHTS, SEGMENTS, 2, mode="token_mean", constant=3.0)
  with pytest.raises(ValueError, match="needs a number of tokens"):
    token_coefficients(WEIGHTS, SEGMENTS, 2, mode="constant")
  with pytest.raises(ValueError, match="allowed"):
    token_coefficients(WEIGHTS, SEGMENTS, 2, mode="mean")  # type: ignore[arg-type]
