"""Ids of a later turn start with all ids of the earlier one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentjax.text import PrefixError


def assert_extends(
  old_ids: Sequence[int] | np.ndarray, new_ids: Sequence[int] | np.ndarray
) -> None:
  """Raises PrefixError unless ``new_ids`` starts with all of ``old_ids``."""
  old, new = np.asarray(old_ids), np.asarray(new_ids)
  common = min(len(old), len(new))
  differing = np.flatnonzero(old[:common] != new[:common])
  if differing.size:
    at = int(differing[0])
    raise PrefixError(
      f"ids differ at index {at}: {int(old[at])} was seen there, now it is {int(new[at])}. "
      "Append to the ids sampled so far, or start a new branch."
    )
  if len(new) < len(old):
    raise PrefixError(
      f"{len(old)} ids were seen and only {len(new)} are left. Append to the ids sampled so far, "
      "or start a new branch."
    )
