"""AEPO's credit by entropy: uncertain tokens count more (2510.14545)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agentjax.config import NonNegativeFloat
from agentjax.objectives.advantage_function import AdvantageInputs, AdvantageTerm
from agentjax.objectives.objective import LossInputs
from agentjax.schedules import Scheduled
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.record import Trajectory

ENTROPY_EXCESS = register_column(
  Column(
    "entropy_excess",
    "float32",
    "Entropy at a drawn token less the mean of the step's, in standard deviations; 0 elsewhere.",
  )
)


@dataclasses.dataclass(unsafe_hash=True)
class EntropyTerm(AdvantageTerm):
  """``A (1 + share (H - mean H) / std H)``, over all drawn tokens of the step; never below 0 A.

  The sign is kept (ours): a token far below the mean would otherwise learn the opposite.

  Attributes:
    share: alpha; .2 in the released port, the paper's is not in our sources.
  """

  share: Scheduled[NonNegativeFloat] = 0.2

  def signals(self, experiment: Experiment) -> Sequence[Signal]:
    return (EntropyExcess(),)

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    return advantages * jnp.maximum(1 + self.share * inputs.column(ENTROPY_EXCESS.name), 0)


@dataclasses.dataclass(unsafe_hash=True)
class EntropyExcessConfig(SignalConfig):
  """Adds the column "entropy_excess" for ``entropy_balanced_clip`` without ``EntropyTerm``."""

  def build(self, tools: SignalTools) -> Signal:
    """See ``SignalConfig.build``."""
    del tools
    return EntropyExcess()


class EntropyExcess(Signal):
  """How uncertain the policy was at each token, beside all drawn tokens of the step.

  Metrics: ``entropy_excess/mean`` and ``entropy_excess/std``, of the entropies, nats.
  """

  name = "entropy_excess"
  adds = (ENTROPY_EXCESS,)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    usable = [t for t in episodes if t.usable]
    drawn = [s.entropies[s.sampled] for t in usable for s in t.segments]
    known = np.concatenate([*drawn, np.zeros(0, np.float32)]).astype(np.float64)
    mean = float(known.mean()) if known.size else 0.0
    deviation = float(known.std()) if known.size else 0.0
    result = []
    for one in episodes:
      segments = [
        s.with_columns(
          {
            ENTROPY_EXCESS.name: np.where(
              s.sampled, (s.entropies - mean) / (deviation + 1e-6), 0
            ).astype(np.float32)
          }
        )
        for s in one.segments
      ]
      result.append(dataclasses.replace(one, segments=segments))
    return result, {"entropy_excess/mean": mean, "entropy_excess/std": deviation}


def entropy_balanced_clip(
  inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Float[Array, "batch time"]:
  """PPO's clip that keeps the gradient of uncertain tokens, for ``objective.function``.

  A token with ``r > 1 + clip_high`` and ``A > 0`` has no gradient in PPO. Where its entropy was
  above the step's mean, its surrogate here is ``(1 + clip_high) r / sg(r) A``: the value of PPO's,
  and the gradient ``(1 + clip_high) A grad log pi``. All other tokens are as in PPO. The bounds are
  ours; the paper's are not in our sources.

  Args:
    inputs: with the column "entropy_excess", which ``EntropyTerm`` and ``EntropyExcessConfig`` add.
    clip_low, clip_high: bounds 1 - clip_low and 1 + clip_high on the ratio.
  """
  ratio = jnp.exp(jnp.clip(inputs.log_probs - inputs.old_log_probs, -20.0, 20.0))
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  # r / sg(r) is 1, with the gradient of log pi.
  one = jnp.exp(inputs.log_probs - jax.lax.stop_gradient(inputs.log_probs))
  kept = (inputs.column(ENTROPY_EXCESS.name) > 0) & (ratio > 1 + clip_high)
  bounded = jnp.where(kept, (1 + clip_high) * one, clipped)
  return -jnp.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
