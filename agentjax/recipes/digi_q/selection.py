"""Best of N: the candidate with the largest advantage, where it is large enough."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from agentjax.recipes.digi_q.settings import ExtractionConfig


class Selection(NamedTuple):
  """Of each state the best candidate and its advantage, and whether it is imitated."""

  best: Int[np.ndarray, " states"]
  advantages: Float[np.ndarray, " states"]
  imitated: Bool[np.ndarray, " states"]


def advantages(
  config: ExtractionConfig,
  actions: Float[np.ndarray, "2 states candidates"],
  states: Float[np.ndarray, "2 states"],
) -> Float[np.ndarray, "states candidates"]:
  """``max(Q_1, Q_2) - max(V_1, V_2)``, or both with min; see ``ExtractionConfig.heads``."""
  joined = np.max if config.heads == "max" else np.min
  return joined(actions, axis=0) - joined(states, axis=0)[..., None]


def select(
  config: ExtractionConfig,
  found: Float[np.ndarray, "states candidates"],
  eligible: Bool[np.ndarray, "states candidates"] | None = None,
) -> Selection:
  """Chooses among the first ``config.used`` candidates of each state.

  Args:
    config: its ``used`` and ``threshold``.
    found: advantages of all stored candidates.
    eligible: candidates that can be imitated; None is all of them.
  """
  some = found if eligible is None else np.where(eligible, found, -np.inf)
  some = some[:, : config.used]
  best = np.argmax(some, axis=1)
  largest = np.take_along_axis(some, best[:, None], axis=1)[:, 0]
  return Selection(best, largest, largest > config.threshold)
