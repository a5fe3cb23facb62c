"""Process rewards: a number for every step of an episode. Nothing is trained.

Monte-Carlo labels (Math-Shepherd, 2312.08935): from each step N completions are played; "hard" is 1
if any of them succeeds, "soft" is the share that succeeds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float


def monte_carlo_labels(
  successes: Float[np.ndarray, "steps completions"], kind: Literal["hard", "soft"]
) -> Float[np.ndarray, " steps"]:
  """Labels of the steps: "hard" 1 where any completion succeeded, "soft" the share of them.

  Args:
    successes: 0 or 1; NaN for a completion without a verdict, which is left out.
    kind: see above.

  Returns:
    One label a step; NaN where no completion has a verdict.
  """
  values = np.asarray(successes, np.float64)
  known = ~np.isnan(values)
  count, total = known.sum(axis=1), np.where(known, values, 0).sum(axis=1)
  label = (total > 0).astype(np.float64) if kind == "hard" else total / np.maximum(count, 1)
  return np.where(count > 0, label, np.nan)
