"""What the functions of this recipe need to know of a run."""

from __future__ import annotations

from typing import NamedTuple


class NoiseSettings(NamedTuple):
  """How text is noised.

  Attributes:
    block: tokens of a block, S.
    mask_id: id of the mask.
    vocab_limit: ids from here on are never predicted.
    stop_ids: that end a turn.
    mask_ratio: share of the tokens that are masked in the supervised loss.
    draws: of the bound.
    seed: of all draws.
  """

  block: int
  mask_id: int
  vocab_limit: int
  stop_ids: tuple[int, ...]
  mask_ratio: float = 0.75
  draws: int = 1
  seed: int = 0
