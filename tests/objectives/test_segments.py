"""Index sets: what a unit is and what its sums are, against plain Python loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.objectives import segments

ROWS, TIME = 2, 9


@st.composite
def packed_rows(draw):
  """Rows of sequences of turns with gaps: segment_ids, turns, weights."""
  segment_ids = np.zeros((ROWS, TIME), int)
  turns = np.full((ROWS, TIME), -1)
  number = 0
  for row in range(ROWS):
    at = 0
    while at < TIME:
      at += draw(st.integers(0, 2))
      length = min(draw(st.integers(1, 5)), TIME - at)
      if length <= 0:
        break
      number += 1
      segment_ids[row, at : at + length] = number
      steps = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
      turns[row, at : at + length] = np.cumsum(steps)
      at += length
  weights = np.array(
    draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=ROWS * TIME, max_size=ROWS * TIME))
  ).reshape(ROWS, TIME)
  return segment_ids, turns, np.where(segment_ids > 0, weights, 0)


def members(segment_ids, turns, level, row, t):
  """Positions of the unit of token t, by its definition."""
  if segment_ids[row, t] == 0:
    return []
  same = segment_ids[row] == segment_ids[row, t]
  if level == "turn":
    same &= turns[row] == turns[row, t]
  if level == "token":
    same &= np.arange(TIME) == t
  return np.flatnonzero(same).tolist()


@settings(max_examples=40, deadline=None)
@given(packed_rows(), st.sampled_from(["token", "turn", "sequence"]), st.integers(0, 99))
def test_unit_reductions_equal_loops_over_the_definition(rows, level, seed):
  segment_ids, turns, weights = rows
  values = np.random.default_rng(seed).normal(size=(ROWS, TIME)).astype(np.float32)
  units = segments.units_of(level, jnp.asarray(segment_ids), jnp.asarray(turns))
  total = np.asarray(segments.unit_sum(jnp.asarray(values), units))
  mean = np.asarray(segments.unit_mean(jnp.asarray(values), jnp.asarray(weights), units))
  first = np.asarray(segments.first_of_unit(jnp.asarray(weights), units))
  last = np.asarray(segments.last_of_unit(jnp.asarray(weights), units))
  for row in range(ROWS):
    for t in range(TIME):
      unit = members(segment_ids, turns, level, row, t)
      weight = weights[row, unit].sum()
      counted = [i for i in unit if weights[row, i] > 0]
      np.testing.assert_allclose(total[row, t], values[row, unit].sum(), atol=1e-5)
      expected = (weights[row, unit] * values[row, unit]).sum() / weight if weight else 0
      np.testing.assert_allclose(mean[row, t], expected, atol=1e-5)
      assert first[row, t] == bool(counted and counted[0] == t)
      assert last[row, t] == bool(counted and counted[-1] == t)


def test_what_stands_on_masked_tokens_never_reaches_a_mean():
  values = jnp.array([[1.0, jnp.nan, 3.0, jnp.inf]])
  weights = jnp.array([[1.0, 0.0, 1.0, 0.0]])
  units = jnp.array([[1, 1, 1, 0]])
  mean = segments.unit_mean(values, weights, units)
  np.testing.assert_allclose(mean, [[2.0, 2.0, 2.0, 0.0]])
  gradient = jax.grad(lambda x: segments.unit_mean(x, weights, units)[0, 0])(values)
  np.testing.assert_allclose(gradient, [[0.5, 0.0, 0.5, 0.0]])


def test_a_unit_ends_where_a_key_changes_or_the_inside_is_left():
  keys = jnp.array([[7, 7, 7, 7, 8, 8]])
  inside = jnp.array([[True, True, False, True, True, False]])
  np.testing.assert_array_equal(segments.runs(keys, inside=inside), [[1, 1, 0, 2, 3, 0]])


def test_sequence_values_reach_their_tokens_and_no_padding():
  segment_ids = jnp.array([[2, 2, 0], [1, 3, 0]])
  tokens = segments.broadcast_to_tokens(jnp.array([10.0, 20.0, 30.0]), segment_ids)
  np.testing.assert_allclose(tokens, [[20, 20, 0], [10, 30, 0]])
  np.testing.assert_allclose(segments.sequence_sum(tokens, segment_ids, 4), [10, 40, 30, 0])


def test_turn_units_without_turns_say_what_is_missing():
  with pytest.raises(ValueError, match="needs turns"):
    segments.units_of("turn", jnp.ones((1, 2), int), None)
