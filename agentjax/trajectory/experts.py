"""Recorded choices of routers, kept small: ids in one or two bytes, the largest for "none". No jax.

An array [tokens, routers, choices] holds the expert ids each token went through in sampling, so
that training can send it the same way. A token whose choice is not known has ``unrecorded`` in all
places; its routers choose for themselves.
"""

from __future__ import annotations

import numpy as np


def compact_dtype(num_experts: int) -> np.dtype:
  """The smallest unsigned dtype for ids 0 to num_experts - 1 and ``unrecorded``."""
  return np.dtype(np.uint8 if num_experts < 2**8 else np.uint16)


def unrecorded(dtype: np.dtype) -> int:
  """The value that stands for no expert in an array of ``dtype``."""
  return int(np.iinfo(dtype).max)
