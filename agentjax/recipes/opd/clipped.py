r"""PPO's clip on every candidate: the loss of on-policy distillation in thunlp/OPD's code.

With ``p_old`` the student at the start of the step, ``q`` the teacher and ``S`` the candidates of a
token, every candidate v has an advantage and a ratio of its own:

  A_v = sg[w_v (log q(v) - log p_old(v))],   r_v = p(v) / p_old(v),
  loss = sum_{v in S} max(-r_v A_v, -clip(r_v, 1 - low, 1 + high) A_v),

at most ``-c A_v`` where ``A_v < 0`` (dual clip). The mean over tokens is that of the objective.

The weights are normalised on the candidates and the log-ratios are not, so the gradient is not that
of a KL divergence (``objectives.distillation``). The clip bounds how far several updates on one
batch move each candidate; a divergence has no such bound.

References: 2604.13016 and its code (``token_reward_direct``, ``LOG_PROB_TOP_K`` above 0).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.config import NonNegativeFloat, PositiveFloat, Share
from agentjax.objectives.distillation import CandidateInputs, CandidateLoss, without_absent
from agentjax.objectives.policy_loss import clipped_surrogate


@dataclasses.dataclass(unsafe_hash=True)
class ClippedCandidates(CandidateLoss):
  """The loss of the module; the defaults are those of its code.

  Attributes:
    weights: w, "student_p": softmax over the candidates of the student's old log-probs;
      "teacher_p": of the teacher's; "none": 1 over their number.
    normalise: the weights sum to 1 over the candidates. False takes the probabilities themselves,
      and 1 with "none", as the code does for candidates "difference" alone.
    clip_low, clip_high: bounds of the ratios are 1 - clip_low and 1 + clip_high.
    dual_clip: c; None is off.
  """

  weights: Literal["student_p", "teacher_p", "none"] = "student_p"
  normalise: bool = True
  clip_low: Share = 0.2
  clip_high: NonNegativeFloat = 0.2
  dual_clip: PositiveFloat | None = 3.0

  def validate(self, path: str = "candidate_loss") -> None:
    super().validate(path)
    floor = f"above 1 + {path}.clip_high, or none"
    high = self.dual_clip is None or self.dual_clip > 1 + self.clip_high
    self.requirements(path)(high, "dual_clip", floor)

  def __call__(
    self, inputs: CandidateInputs
  ) -> tuple[Float[Array, "*lead"], dict[str, Float[Array, "*lead"]]]:
    """Sums over the candidates; metrics are ``candidate_advantage``, the sum of A, and
    ``candidate_clip_fraction``, the share of candidates whose gradient the clip changed."""
    advantages = self.advantages(inputs)
    log_ratio = jnp.where(inputs.inside, inputs.log_probs - inputs.old_log_probs, 0)
    loss = clipped_surrogate(
      log_ratio, advantages, self.clip_low, self.clip_high, dual_clip=self.dual_clip
    )
    count = jnp.maximum(jnp.sum(inputs.inside, axis=-1), 1)
    return jnp.sum(loss.per_token, axis=-1), {
      "candidate_advantage": jnp.sum(advantages, axis=-1),
      "candidate_clip_fraction": jnp.sum(loss.clipped & inputs.inside, axis=-1) / count,
    }

  def advantages(self, inputs: CandidateInputs) -> Float[Array, "*lead k"]:
    """``A_v`` of every candidate, 0 on places that are not in the set."""
    old, teacher = inputs.old_log_probs, inputs.teacher_log_probs
    log_weights = {"student_p": old, "teacher_p": teacher, "none": jnp.zeros_like(old)}
    chosen = without_absent(log_weights[self.weights], inputs.inside)
    weights = jax.nn.softmax(chosen) if self.normalise else jnp.exp(chosen)
    return jax.lax.stop_gradient(jnp.where(inputs.inside, weights * (teacher - old), 0))
