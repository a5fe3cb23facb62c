"""Old log-probs and values of the trainer's policy before an update, in one forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentjax.objectives.columns import OLD_LOG_PROBS, VALUES
from agentjax.signals.signal import BatchContext, Result, Signal
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import get_column


class PolicyScores(Signal):
  """Old log-probs, and the values of a critic that is a head on the policy.

  Args:
    recomputed: adds old log-probs.
    critic: adds values.
    replaces_behaviour: the tokens have another context than in sampling, so the log-probs also
      replace the sampler's.
  """

  name = "policy"

  def __init__(self, *, recomputed: bool, critic: bool, replaces_behaviour: bool):
    self._recomputed, self._critic, self._replaces = recomputed, critic, replaces_behaviour
    columns = (
      (recomputed, OLD_LOG_PROBS),
      (critic, VALUES),
      (replaces_behaviour, get_column("behaviour_log_probs")),
    )
    self.adds = tuple(column for present, column in columns if present)

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    whole = dataclasses.replace(networks["policy"].weights, policy=context.policy())
    log_probs, values = context.score(whole, batch)
    columns = {}
    if self._recomputed:
      columns["old_log_probs"] = log_probs
    if self._critic:
      columns["values"] = values
    if self._replaces:
      columns["behaviour_log_probs"] = log_probs
    return Result(columns)
