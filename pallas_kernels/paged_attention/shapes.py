"""The sizes that the tests check and the benchmark times: one list for both."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
  """Sizes of one call of ``paged_attention``."""

  rows: int
  time: int
  heads: int
  kv_heads: int
  width: int
  value_dim: int
  page: int  # tokens
  pages: int  # of a row of the page table
  window: int | None = None
  latent: bool = False  # values are the first channels of the keys


# All but the first and last hold more places than a tile, or several blocks of queries.
CHECKED = {
  "a step": Shape(4, 1, 8, 2, 16, 16, 16, 5),
  "a key head a head": Shape(4, 1, 8, 8, 16, 16, 64, 9),
  "one key head": Shape(4, 5, 6, 1, 32, 16, 8, 40),
  "a window": Shape(4, 3, 4, 2, 16, 24, 16, 40, window=37),
  "a prefill": Shape(4, 40, 4, 2, 16, 16, 64, 6),
  "latent": Shape(4, 2, 12, 1, 24, 16, 16, 20, latent=True),
  "pages larger than a tile": Shape(4, 2, 4, 2, 16, 16, 320, 2),
  "one page": Shape(4, 7, 4, 2, 16, 16, 64, 1, window=5),
}

TIMED = {
  "decode": Shape(64, 1, 32, 8, 128, 128, 64, 64),
  "prefill": Shape(4, 512, 32, 8, 128, 128, 64, 64),
  "latent decode": Shape(32, 1, 64, 1, 640, 512, 64, 64, latent=True),
}

TIMED_ON_CPU = {
  "decode": Shape(16, 1, 8, 2, 64, 64, 256, 16),
  "decode, small pages": Shape(16, 1, 8, 2, 64, 64, 32, 128),
  "prefill": Shape(2, 64, 8, 2, 64, 64, 256, 8),
  "latent decode": Shape(8, 1, 16, 1, 160, 128, 256, 16, latent=True),
}
