"""Places in pages against the same places in one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.adapters.model_families.parcae import flattened, unflattened
from agentjax.models.pages import Paged, read_places, write_places
from pallas_kernels.paged_attention import quantize_tokens

ROWS, LENGTH, TOKENS, WIDTH = 4, 22, 8, 3
ENTRIES = -(-LENGTH // TOKENS)


def paged(ways: int, middle: tuple[int, ...]) -> tuple[jax.Array, Paged]:
  """Rows with random values, as an array, and in pages in a random order."""
  rng = np.random.default_rng(0)
  dense = rng.standard_normal((ROWS, *middle, ENTRIES * TOKENS, WIDTH)).astype(np.float32)
  dense[..., LENGTH:, :] = 0
  part = 1 + ROWS // ways * ENTRIES
  pool = np.zeros((ways * part, *middle, TOKENS, WIDTH), np.float32)
  table = np.zeros((ROWS, ENTRIES), np.int32)
  for way in range(ways):
    pages = way * part + 1 + rng.permutation(part - 1)
    rows = range(way * ROWS // ways, (way + 1) * ROWS // ways)
    for i, (row, entry) in enumerate((r, e) for r in rows for e in range(ENTRIES)):
      table[row, entry] = pages[i]
      pool[pages[i]] = dense[row, ..., entry * TOKENS : (entry + 1) * TOKENS, :]
  held = Paged(jnp.asarray(pool), jnp.asarray(table), LENGTH, ways)
  return jnp.asarray(dense[..., :LENGTH, :]), held


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("middle", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_narrow_pages_give_back_what_was_written_rounded(ways, middle, dtype):
  _, held = paged(ways, middle)
  narrow = Paged(
    pool=jnp.zeros(held.pool.shape, dtype),
    table=held.table,
    length=LENGTH,
    ways=ways,
    scales=jnp.zeros(held.pool.shape[:-1]),
    dtype=jnp.bfloat16,
  )
  values = np.random.default_rng(1).standard_normal((ROWS, 5, *middle, WIDTH)).astype(np.float32)
  places = jnp.arange(5) + jnp.array([[0], [6], [17], [20]])  # the last runs past the end
  narrow = jax.jit(write_places)(narrow, None, places, jnp.asarray(values))
  numbers, scales = quantize_tokens(jnp.asarray(values), dtype)
  expected = (numbers.astype(jnp.float32) * scales[..., None]).astype(jnp.bfloat16)
  read = read_places(narrow, None, 0, LENGTH)
  assert read.dtype == jnp.bfloat16 and narrow.pool.dtype == dtype
  for row, first in enumerate(places[:, 0]):
    count = min(5, LENGTH - int(first))
    found = jnp.moveaxis(read[row], -2, 0)[first : first + count]
    np.testing.assert_array_equal(found, expected[row, :count])
  assert not np.any(read[1, ..., :6, :])
  some = jnp.array([2, 0])
  np.testing.assert_array_equal(read_places(narrow, some, 8, 8), read[some][..., 8:16, :])
  if middle:
    flat = flattened(narrow, 2)
    np.testing.assert_array_equal(read_places(flat, None, 0, LENGTH), flattened(read, 2))
    np.testing.assert_array_equal(unflattened(flat, 2).scales, narrow.scales)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("middle", [(), (2,), (3, 2)], ids=str)
def test_reading_and_writing_pages_is_reading_and_writing_rows(ways, middle):
  dense, held = paged(ways, middle)
  assert held.shape == dense.shape
  some = jnp.array([2, 0, ROWS])  # the last is no row
  for rows, places in (
    (None, np.array([[0, 5], [21, 22], [7, 8], [16, 99]])),
    (some, np.array([[1, 2], [20, 30], [3, 4]])),
  ):
    values = np.random.default_rng(1).standard_normal((len(places), 2, *middle, WIDTH))
    write = jax.jit(write_places)
    dense = write(dense, rows, jnp.asarray(places), jnp.asarray(values, jnp.float32))
    held = write(held, rows, jnp.asarray(places), jnp.asarray(values, jnp.float32))
    for start, size in ((0, LENGTH), (3, 8), (14, 8)):
      np.testing.assert_array_equal(
        read_places(held, None, start, size), read_places(dense, None, start, size)
      )
      np.testing.assert_array_equal(
        read_places(held, some[:2], start, size), read_places(dense, some[:2], start, size)
      )


def test_a_row_without_a_page_reads_zeros_and_loses_what_is_written():
  _, held = paged(2, (2,))
  part = held.pool.shape[0] // 2
  held = held.replace(table=held.table.at[3, 1].set(part))
  assert not read_places(held, None, TOKENS, TOKENS)[3].any()
  places = jnp.full((ROWS, 1), LENGTH).at[3, 0].set(TOKENS)
  for rows in (None, jnp.arange(ROWS)):
    after = write_places(held, rows, places, jnp.ones((ROWS, 1, 2, WIDTH)))
    np.testing.assert_array_equal(after.pool, held.pool)


def test_iterations_of_a_loop_are_rows_of_their_own():
  dense, held = paged(2, (3, 2))
  flat, rows = flattened(held, 3), flattened(dense, 3)
  np.testing.assert_array_equal(read_places(flat, jnp.arange(12), 2, 9), rows[:, :, 2:11])
  places = jnp.full((12, 1), 9)
  written = write_places(flat, jnp.arange(12), places, jnp.ones((12, 1, 2, WIDTH)))
  assert (read_places(written, jnp.arange(12), 9, 1) == 1).all()
  back = unflattened(flat, 3)
  np.testing.assert_array_equal(back.table, held.table)
  np.testing.assert_array_equal(back.pool, held.pool)
