"""Log-probs of the tokens under the frozen reference policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentjax.objectives.columns import REFERENCE_LOG_PROBS
from agentjax.signals.signal import BatchContext, Result, Signal
from agentjax.trajectory.batch import Batch


class ReferenceScores(Signal):
  """Log-probs under the reference policy."""

  name = "reference"
  adds = (REFERENCE_LOG_PROBS,)

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    # The reference chooses its own experts: those recorded are the sampler's.
    log_probs, _ = context.score(networks["reference"].weights, batch.without("experts"))
    return Result({"reference_log_probs": log_probs})
