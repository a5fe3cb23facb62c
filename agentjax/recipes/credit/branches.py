"""Advantages of tokens that several branches of one episode share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from agentjax.config import check
from agentjax.objectives.advantage_function import AdvantageInputs, AdvantageTerm
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.training.experiment import Experiment


@dataclasses.dataclass(unsafe_hash=True)
class SharedTerm(AdvantageTerm):
  """The mean over all copies of a shared segment on each of them; other tokens keep theirs.

  The batch has every copy of a segment that several branches share. Without this term each copy has
  the advantage of its own branch. On policy both have one gradient; once ratios are clipped they
  differ. These are ARPO's "soft", its default, and "hard" (2507.19849). Copies without weight, such
  as those of a masked sequence, do not count.
  """

  def check_run(self, experiment: Experiment, objective: ObjectiveConfig, path: str) -> None:
    """A segment has one advantage in a sequence."""
    credit = objective.advantage.credit
    check(credit == "broadcast", f"{path}.advantage.credit", credit, "'broadcast' with 'shared'")

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    branches = inputs.column("branches")
    places, ids = branches.size + 1, branches.ravel()
    inside = (inputs.weights > 0).astype(advantages.dtype)
    total = jax.ops.segment_sum((inside * advantages).ravel(), ids, places)
    count = jax.ops.segment_sum(inside.ravel(), ids, places)
    mean = total / jnp.where(count > 0, count, 1)
    return jnp.where(branches > 0, mean[branches], advantages)
