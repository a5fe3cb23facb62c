"""Boxes, frames and paths, on cases that can be checked by eye."""

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.rad2.geometry import at_length, boxes_overlap, into_frame, out_of_frame

_CAR = (4.0, 2.0)
_QUARTER = np.pi / 2


@pytest.mark.parametrize(
  ("other", "touches"),
  [
    ((3.9, 0.0, 0.0), True),  # bumper to bumper
    ((4.1, 0.0, 0.0), False),
    ((0.0, 1.9, 0.0), True),  # side by side
    ((0.0, 2.1, 0.0), False),
    ((2.9, 0.0, _QUARTER), True),  # across the way: half a length and half a width
    ((3.1, 0.0, _QUARTER), False),
    ((3.3, 2.3, np.pi / 4), True),  # its corner is inside
    ((3.5, 2.6, -np.pi / 4), False),  # boxes along x and y would overlap
    ((0.2, 0.1, 1.0), True),  # one in the other
  ],
)
def test_boxes_touch_where_they_do(other, touches):
  one, two = jnp.zeros(3), jnp.array(other)
  assert bool(boxes_overlap(one, jnp.array(_CAR), two, jnp.array(_CAR))) == touches
  assert bool(boxes_overlap(two, jnp.array(_CAR), one, jnp.array(_CAR))) == touches
  moved = jnp.array([30.0, -4.0, 0.0])
  turn = 0.7  # the same pair elsewhere, turned
  first = jnp.append(out_of_frame(one[:2], moved.at[2].set(turn)), turn)
  second = jnp.append(out_of_frame(two[:2], moved.at[2].set(turn)), two[2] + turn)
  assert bool(boxes_overlap(first, jnp.array(_CAR), second, jnp.array(_CAR))) == touches


def test_sizes_belong_to_their_boxes():
  long, short = jnp.array([10.0, 1.0]), jnp.array([1.0, 1.0])
  at = jnp.array([5.0, 0.0, 0.0])
  assert boxes_overlap(jnp.zeros(3), long, at, short)
  assert not boxes_overlap(jnp.array([0.0, 0.0, _QUARTER]), long, at, short)


def test_a_frame_looks_ahead_and_back():
  pose = jnp.array([2.0, 1.0, _QUARTER])
  np.testing.assert_allclose(into_frame(jnp.array([2.0, 4.0]), pose), [3.0, 0.0], atol=1e-6)
  np.testing.assert_allclose(into_frame(jnp.array([1.0, 1.0]), pose), [0.0, 1.0], atol=1e-6)
  points = jnp.array([[5.0, -3.0], [0.0, 0.0]])
  np.testing.assert_allclose(out_of_frame(into_frame(points, pose), pose), points, atol=1e-5)


def test_a_path_goes_round_its_corner_and_straight_on_beyond():
  path = jnp.array([[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]])
  found = at_length(path, jnp.array([0.0, 2.0, 5.0, 7.0, 9.0]))
  np.testing.assert_allclose(found, [[0, 0], [2, 0], [3, 2], [3, 4], [3, 6]], atol=1e-5)
  standing = jnp.zeros((3, 2))
  np.testing.assert_allclose(at_length(standing, jnp.array([2.0])), [[2.0, 0.0]])
