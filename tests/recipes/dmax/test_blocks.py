"""Blocks of rows: their fill, what they see, and which of their tokens are noised."""

import itertools

import numpy as np
import pytest

from agentjax.recipes.dmax.blocks import (
  Text,
  block_sight,
  fill_blocks,
  in_blocks,
  share_mask,
  subset_mask,
)
from tests.recipes.dmax.dense import BLOCK, STOP

# Two sequences of 6 and 3 tokens in one row, at multiples of the block; the first one ends in a
# stop id, the second was cut off.
IDS = np.array([[5, 6, 7, 8, 9, STOP, 0, 0, 4, 5, 6, 0, 0, 0, 0, 0]], np.int32)
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 0, 0, 0, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0]])
NOISE = np.array([[0, 0, 9, 9, 9, 9, 0, 0, 0, 9, 9, 0, 0, 0, 0, 0]])


def fill(*rows):
  rows = rows or (IDS, SEGMENTS, POSITIONS, NOISE)
  return fill_blocks(*rows, block=BLOCK, stop_ids=(STOP,))


def test_a_stop_fills_its_block_and_nothing_is_known_behind_a_cut():
  text = fill()
  np.testing.assert_array_equal(text.token_ids[0, :8], [5, 6, 7, 8, 9, STOP, STOP, STOP])
  np.testing.assert_array_equal(text.segment_ids[0], [1] * 8 + [2] * 4 + [0] * 4)
  np.testing.assert_array_equal(text.positions[0, :12], [*range(8), *range(4)])
  np.testing.assert_array_equal(text.noise[0], [0, 0, 9, 9, 9, 9, 9, 9, 0, 9, 9, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(np.flatnonzero(text.unknown[0]), [11])
  np.testing.assert_array_equal(text.ends[0, ::BLOCK], [3, 5, 10, 12])


def test_a_noised_block_sees_itself_and_the_clean_blocks_before_it():
  time = 3 * BLOCK
  ranks, lanes = (np.asarray(v[0]) for v in block_sight(1, time, BLOCK))
  for i, j in itertools.product(range(2 * time), repeat=2):
    seen = ranks[j] <= ranks[i] and lanes[j] in (0, lanes[i])
    (noisy, block), (to_noisy, to_block) = ((at < time, at % time // BLOCK) for at in (i, j))
    if noisy:
      wanted = block == to_block if to_noisy else to_block < block
    else:
      wanted = not to_noisy and to_block <= block
    assert seen == wanted, (i, j)


def _moved(rows, at):
  """The first sequence alone, in a longer row, from block ``at`` on."""
  moved = np.zeros((4, 1, 24), int)
  for to, row in zip(moved, rows, strict=True):
    to[0, at * BLOCK : at * BLOCK + 6] = row[0, :6]
  moved[1] *= 5  # another number of the sequence
  return moved


@pytest.mark.slow
def test_masks_depend_on_the_sequence_alone():
  rows = (IDS, SEGMENTS, POSITIONS, NOISE)
  text, moved = fill(), fill(*_moved(rows, at=3))
  for draw in range(8):
    for own, other in (
      (share_mask(text, BLOCK, 0, draw, 0.5), share_mask(moved, BLOCK, 0, draw, 0.5)),
      (subset_mask(text, BLOCK, 0, draw)[1], subset_mask(moved, BLOCK, 0, draw)[1]),
    ):
      np.testing.assert_array_equal(own[0, :8], other[0, 12:20])


def _many(number):
  """A thousand rows with one block of which three tokens may be noised."""
  ids = np.tile([[1, 2, 3, 4]], (number, 1))
  places = np.tile(np.arange(4), (number, 1))
  noise = np.tile([[0, 1, 1, 1]], (number, 1)) * np.arange(1, number + 1)[:, None]
  same = np.ones_like(ids)
  return Text(ids, same, places, noise, same < 0, 0 * same + 3)


def test_shares_and_sizes_of_masks_are_what_they_are_said_to_be():
  text, count = _many(1000), 1000
  masked = np.asarray(share_mask(text, 4, 0, 0, 0.75))
  assert not masked[:, 0].any()
  # Four standard deviations.
  assert masked[:, 1:].mean() == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / 3000) ** 0.5)
  chosen, scale = (np.asarray(v) for v in subset_mask(text, 4, 0, 0))
  sizes = chosen.sum(axis=1)
  for size in (1, 2, 3):
    share = (sizes == size).mean()
    assert share == pytest.approx(1 / 3, abs=4 * (2 / 9 / count) ** 0.5)
    np.testing.assert_allclose(scale[chosen & (sizes == size)[:, None]], 3 / size, rtol=1e-6)
  assert not chosen[:, 0].any()
  for at in (1, 2, 3):  # of the sets of one token, each is as likely
    alone = chosen[sizes == 1, at].mean()
    assert alone == pytest.approx(1 / 3, abs=4 * (2 / 9 / (sizes == 1).sum()) ** 0.5)


def test_blocks_cut_time():
  np.testing.assert_array_equal(in_blocks(np.arange(8)[None], 4), [[[0, 1, 2, 3], [4, 5, 6, 7]]])
