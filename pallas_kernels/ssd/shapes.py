"""The sizes that the tests check and the benchmark times: one list for both."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
  """Sizes of one call of ``ssd``: batch, time, heads, head width, groups, state size, chunk."""

  batch: int
  time: int
  heads: int
  width: int
  groups: int
  size: int
  chunk: int


CHECKED = {
  "one token": Shape(3, 1, 2, 4, 1, 4, 8),
  "shorter than a chunk": Shape(2, 5, 4, 8, 2, 16, 8),
  "whole chunks": Shape(2, 24, 4, 8, 1, 8, 8),
  "a rest": Shape(2, 37, 4, 4, 2, 8, 8),
  "a group a head": Shape(1, 20, 4, 4, 4, 8, 16),
  "chunks of one": Shape(1, 6, 2, 4, 1, 4, 1),
}

TIMED = {
  "quickstart": Shape(16, 256, 8, 16, 1, 16, 32),
  "long": Shape(1, 2048, 8, 64, 1, 128, 64),
}
