import numpy as np
import pytest

from agentjax.recipes.diffusion_nft.drawings import (
  ASPECTS,
  SIZES,
  UNCLEAR,
  agrees,
  corrupt,
  describe,
  random_rows,
  read_drawings,
  render,
)


def _rng(seed=0):
  return np.random.default_rng(seed)


def test_the_reader_recovers_what_was_drawn():
  rows = random_rows(_rng(), 120)
  images = render(_rng(1), rows)
  assert images.shape == (120, 32, 32, 3) and images.dtype == np.float32
  np.testing.assert_array_equal(read_drawings(images), rows)
  noisy = images + _rng(2).normal(0, 0.1, images.shape)
  assert (read_drawings(noisy) == rows).mean() > 0.98


def test_one_seed_draws_one_picture():
  rows = random_rows(_rng(), 3)
  np.testing.assert_array_equal(render(_rng(1), rows), render(_rng(1), rows))
  assert (render(_rng(1), rows) != render(_rng(2), rows)).any()


def test_what_cannot_be_read_is_unclear_and_agrees_with_nothing():
  noise = _rng().normal(size=(2, 32, 32, 3)).clip(-1, 1)
  empty = np.full((1, 32, 32, 3), 0.8)
  found = read_drawings(np.concatenate([noise, empty]))
  assert (found == UNCLEAR).all()
  assert not agrees(found, random_rows(_rng(), 3)).any()


def test_objects_that_differ_have_no_common_value():
  one, other = render(_rng(), np.array([[0, 0, 0, 0], [1, 2, 0, 3]]))
  both = one.copy()
  both[16:, 16:] = other[16:, 16:]
  np.testing.assert_array_equal(read_drawings(both[None]), [[UNCLEAR, UNCLEAR, 1, UNCLEAR]])


def test_a_share_of_attributes_is_replaced_by_other_values():
  rows = random_rows(_rng(), 2000)
  changed = corrupt(_rng(1), rows, 0.3)
  assert (changed != rows).mean() == pytest.approx(0.3, abs=0.02)
  assert (changed >= 0).all() and (changed < SIZES).all()
  assert (corrupt(_rng(1), rows, 1.0) != rows).all()
  np.testing.assert_array_equal(corrupt(_rng(1), rows, 0.0), rows)


def test_prompts_in_words():
  assert ASPECTS == ("shape", "colour", "count", "place")
  assert describe(np.array([0, 0, 1, 0])) == "two red discs, top left"
  assert describe(np.array([3, 5, 2, 3])) == "three black crosses, bottom right"
  assert describe(np.array([1, 2, 0, 1])) == "one blue square, top right"
