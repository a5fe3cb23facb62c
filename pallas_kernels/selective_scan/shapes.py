"""The sizes that the tests check and the benchmark times: one list for both."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
  """Sizes of one call of ``selective_scan``: batch, time, channels, groups, state size, chunk."""

  batch: int
  time: int
  channels: int
  groups: int
  size: int
  chunk: int


CHECKED = {
  "one token": Shape(3, 1, 4, 1, 4, 8),
  "shorter than a chunk": Shape(2, 7, 6, 2, 16, 8),
  "a chunk and one": Shape(2, 9, 4, 1, 8, 8),
  "whole chunks": Shape(1, 24, 8, 1, 4, 8),
  "a rest, odd sizes": Shape(2, 37, 6, 3, 3, 8),
  "chunks of one": Shape(1, 6, 4, 4, 4, 1),
}

TIMED = {
  "quickstart": Shape(1, 2048, 512, 1, 16, 64),
  "Mamba 2.8B": Shape(1, 2048, 5120, 1, 16, 64),
}
