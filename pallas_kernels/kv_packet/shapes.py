"""The sizes that the tests check and a benchmark times: one list for both."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
  """Sizes of one call of ``packet_attention``."""

  rows: int
  time: int
  heads: int
  kv_heads: int
  width: int
  value_dim: int
  page: int  # tokens
  packets: tuple[int, ...]  # tokens of each, in every row
  tail: int  # tokens of a row behind them, at most
  turned: int = 0  # channels that a rotary embedding turns
  first: int = 0  # of these channels
  interleaved: bool = False
  groups: int = 0  # of rows that share all packets; 0: each row has its own
  window: int | None = None
  latent: bool = False  # values are the first channels of the keys


CHECKED = {
  "a step": Shape(4, 1, 8, 2, 16, 16, 16, (37, 16, 5), 20, turned=16),
  "a step, no positions": Shape(4, 1, 8, 2, 16, 16, 16, (37, 16, 5), 20),
  "a step of a group": Shape(4, 1, 8, 2, 16, 16, 64, (70, 40), 20, turned=16, groups=2),
  "a prefill": Shape(4, 40, 4, 2, 16, 24, 16, (37, 16, 5), 60, turned=16),
  "a prefill of a group": Shape(4, 9, 4, 2, 16, 16, 8, (37, 16, 5), 20, turned=16, groups=1),
  "part of the channels": Shape(4, 3, 4, 1, 24, 16, 16, (40, 30), 20, turned=8, first=6),
  "latent": Shape(4, 2, 12, 1, 24, 16, 16, (37, 30), 20, 8, 16, True, latent=True),
  "a window": Shape(4, 3, 4, 2, 16, 16, 16, (37, 16, 5), 30, turned=16, window=37),
  "several tiles": Shape(4, 2, 4, 2, 16, 16, 32, (300, 290), 40, turned=16),
}

# Eight documents each, of many contexts and of groups that share them.
TIMED = {
  "decode": Shape(32, 1, 32, 8, 128, 128, 64, (500,) * 8, 256, turned=128),
  "decode of groups": Shape(64, 1, 32, 8, 128, 128, 64, (500,) * 8, 256, turned=128, groups=4),
  "prefill": Shape(4, 256, 32, 8, 128, 128, 64, (500,) * 8, 256, turned=128),
}
