"""The policy loss: ratio level x gradient form x clip, plus KL, entropy and likelihood terms.

``per_token = -surrogate(log_ratio, A)`` with the log-ratio ``log pi - log pi_old`` of a token, or
averaged over its turn or sequence. Nothing is reduced here: ``aggregation`` gives coefficients.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import (
  Config,
  ConfigError,
  NonNegativeFloat,
  PositiveFloat,
  PositiveShare,
)
from agentjax.objectives.aggregation import Aggregation
from agentjax.objectives.kl import LOG_RATIO_LIMIT, KlEstimator
from agentjax.objectives.mismatch import MismatchConfig
from agentjax.objectives.segments import Level, unit_mean, units_of


@dataclasses.dataclass(unsafe_hash=True)
class PolicyLossConfig(Config):
  """A published policy loss is a value of this class (``presets``).

  Attributes:
    ratio_level: ratio of a "token", or geometric mean over its "turn" (chunk) or "sequence".
    gradient_form: "ratio" differentiates the surrogate ``r A`` itself; "score" weights the score
      function, ``sg(w(r)) A log pi``.
    clip: how the update is bounded. "none"; "ppo" (pessimistic clip of r for "ratio", plain clip of
      the weight for "score"); "mask" (no gradient beyond the bound in the direction of the
      advantage); "truncate" (weight ``min(r, 1 + clip_high)``); "unit" (weight 1, plain REINFORCE);
      "sapo" (soft sigmoid gate); "gmpo" (each token's log-ratio clipped to [-clip_low, clip_high]
      by the sign of A before the geometric mean).
    clip_low, clip_high: bounds 1 - clip_low and 1 + clip_high on r (log bounds for "gmpo").
    dual_clip: c > 1; for A < 0 the surrogate is at least c A. None = off.
    positive_weight_one: weight 1 instead of w(r) where A > 0 (TOPR, IPA).
    sapo_temperature_positive, sapo_temperature_negative: gate sharpness for A > 0 and A <= 0.
    mismatch: correction for differences between sampler and trainer.
    kl_coefficient, kl_estimator: KL to the reference policy as an added loss; 0 = off.
    kl_weight: differentiable weight of that estimate (``kl.kl_estimate``). "none"; "current":
      pi / sg(pi), which is 1 and adds the score function to the gradient (NeMo-RL);
      "behaviour": pi / pi_behaviour, an importance weight for tokens of another policy (NeMo-RL's
      on-policy approximation). With the estimators "k1", "k2" and "k3".
    entropy_coefficient: bonus, subtracted.
    positive_nll_coefficient: added negative log-likelihood of the tokens of sequences whose reward
      is above 0 (VAPO), in the loss's own aggregation.
    covariance: "none"; "clip" (no loss on the selected tokens, Clip-Cov) or "kl" (adds
      ``covariance_kl_coefficient |log r|`` on them, KL-Cov). Selected is the covariance_fraction of
      tokens with the largest (A - mean A)(log pi_old - mean log pi_old).
    aggregation, aggregation_constant: see ``aggregation.token_coefficients``.
  """

  ratio_level: Level = "token"
  gradient_form: Literal["ratio", "score"] = "ratio"
  clip: Literal["none", "ppo", "mask", "truncate", "unit", "sapo", "gmpo"] = "ppo"
  clip_low: NonNegativeFloat = 0.2
  clip_high: NonNegativeFloat = 0.2
  dual_clip: float | None = None
  positive_weight_one: bool = False
  sapo_temperature_positive: PositiveFloat = 1.0
  sapo_temperature_negative: PositiveFloat = 1.05
  mismatch: MismatchConfig = dataclasses.field(default_factory=MismatchConfig)
  kl_coefficient: NonNegativeFloat = 0.0
  kl_estimator: KlEstimator = "k3"
  kl_weight: Literal["none", "current", "behaviour"] = "none"
  entropy_coefficient: float = 0.0
  positive_nll_coefficient: NonNegativeFloat = 0.0
  covariance: Literal["none", "clip", "kl"] = "none"
  covariance_fraction: PositiveShare = 2e-4
  covariance_kl_coefficient: NonNegativeFloat = 1.0
  aggregation: Aggregation = "token_mean"
  aggregation_constant: PositiveFloat | None = None

  @property
  def needs_reference(self) -> bool:
    """Whether reference log-probs must be computed for the loss."""
    return self.kl_coefficient > 0

  def validate(self, path: str = "policy_loss") -> None:
    super().validate(path)
    require = self.requirements(path)
    if self.clip != "gmpo":
      require(self.clip_low <= 1, "clip_low", "0 to 1 (bounds the ratio)")

    ratio_only, score_only = ("sapo", "gmpo"), ("truncate", "unit")
    if self.gradient_form == "score" and self.clip in ratio_only:
      self._conflict(path, "clip", "gradient_form", "set gradient_form='ratio'")
    if self.gradient_form == "ratio" and self.clip in score_only:
      self._conflict(path, "clip", "gradient_form", "set gradient_form='score', or clip='ppo'")
    if self.gradient_form == "ratio" and self.positive_weight_one:
      self._conflict(path, "positive_weight_one", "gradient_form", "set gradient_form='score'")
    if self.clip == "mask" and self.positive_weight_one:
      self._conflict(path, "clip", "positive_weight_one", "one masks what the other keeps")
    if self.clip == "gmpo" and self.ratio_level == "token":
      self._conflict(path, "clip", "ratio_level", "set ratio_level='sequence' or 'turn'")
    if self.dual_clip is not None:
      if self.clip != "ppo" or self.gradient_form != "ratio":
        self._conflict(path, "dual_clip", "clip", "it needs clip='ppo', gradient_form='ratio'")
      floor = f"above 1 + {path}.clip_high"
      require(self.dual_clip > 1 + self.clip_high, "dual_clip", floor)
    if self.kl_weight != "none":
      require(
        self.kl_coefficient > 0,
        "kl_weight",
        f"'none' with {path}.kl_coefficient={self.kl_coefficient}",
      )
      require(
        self.kl_estimator in ("k1", "k2", "k3"),
        "kl_estimator",
        f"'k1', 'k2' or 'k3' with {path}.kl_weight={self.kl_weight!r}",
      )
    elif self.kl_coefficient > 0 and self.kl_estimator == "k1":
      raise ConfigError(
        f"{path}.kl_estimator='k1' as a loss has zero expected gradient ({path}.kl_coefficient="
        f"{self.kl_coefficient}); use 'k2' or 'k3_plus', kl_weight='current', or put k1 into the "
        "reward (advantage.kl_in_reward)."
      )
    if (self.aggregation == "constant") != (self.aggregation_constant is not None):
      self._conflict(
        path,
        "aggregation",
        "aggregation_constant",
        "'constant' needs a number of tokens, the others None",
      )

  def _conflict(self, path: str, name: str, other: str, remedy: str) -> None:
    raise ConfigError(
      f"{path}.{name}={getattr(self, name)!r} does not go with {path}.{other}="
      f"{getattr(self, other)!r}; {remedy}."
    )


class PolicyLoss(NamedTuple):
  """Unreduced. ``clipped`` marks tokens whose gradient the clip changed."""

  per_token: Float[Array, "batch time"]
  ratio: Float[Array, "batch time"]
  clipped: Bool[Array, "batch time"]


def policy_loss(
  log_probs: Float[Array, "batch time"],
  old_log_probs: Float[Array, "batch time"],
  advantages: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  config: PolicyLossConfig,
  *,
  turns: Int[Array, "batch time"] | None = None,
  clip_high_bonus: Float[Array, "batch time"] | float = 0.0,
) -> PolicyLoss:
  """The surrogate that ``config`` names, of every token, without its added terms.

  Args:
    log_probs: current policy, differentiable, fp32 or wider.
    old_log_probs: policy at the start of the update.
    advantages: credit a token, already times the importance weight; no gradient flows into it.
    weights: tokens with weight 0 enter no mean and get loss 0.
    segment_ids: 0 on padding; ``turns`` names the chunks for ratio_level "turn".
    clip_high_bonus: added to clip_high, a number or one a token (ADPO).

  References: see ``presets``.
  """
  advantages = jax.lax.stop_gradient(advantages)
  inside = weights > 0
  # Masked before any product: values of tokens without weight must not reach a gradient.
  log_ratio = jnp.where(inside, log_probs - jax.lax.stop_gradient(old_log_probs), 0)
  log_probs = jnp.where(inside, log_probs, 0)
  advantages = jnp.where(inside, advantages, 0)
  low, high = config.clip_low, config.clip_high + clip_high_bonus

  if config.clip == "gmpo":
    units = units_of(config.ratio_level, segment_ids, turns)
    loss = geometric_mean_surrogate(log_ratio, advantages, weights, units, low, high)
    return _masked(loss, inside)
  if config.ratio_level != "token":
    units = units_of(config.ratio_level, segment_ids, turns)
    log_ratio = unit_log_ratio(log_ratio, log_probs, weights, units)

  if config.gradient_form == "score":
    loss = score_function(
      log_probs,
      log_ratio,
      advantages,
      low,
      high,
      clip=config.clip,
      positive_weight_one=config.positive_weight_one,
    )
  elif config.clip == "sapo":
    loss = soft_gate(
      log_ratio,
      advantages,
      config.sapo_temperature_positive,
      config.sapo_temperature_negative,
    )
  elif config.clip == "none":
    ratio = _ratio(log_ratio)
    loss = PolicyLoss(-ratio * advantages, ratio, jnp.zeros(ratio.shape, bool))
  elif config.clip == "mask":
    ratio = _ratio(log_ratio)
    outside = _out_of_bounds(ratio, advantages, low, high)
    loss = PolicyLoss(jnp.where(outside, 0, -ratio * advantages), ratio, outside)
  else:
    loss = clipped_surrogate(log_ratio, advantages, low, high, dual_clip=config.dual_clip)
  return _masked(loss, inside)


def unit_log_ratio(
  log_ratio: Float[Array, "batch time"],
  log_probs: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  units: Int[Array, "batch time"],
) -> Float[Array, "batch time"]:
  """Mean log-ratio of the unit in value, the token's own log-prob in gradient.

  ``sg(mean_unit(log r)) + log pi_t - sg(log pi_t)``: with one advantage a unit its gradient is that
  of the geometric mean ratio, and advantages may differ inside a unit. GSPO-token, 2507.18071.
  """
  counted = (weights > 0).astype(log_ratio.dtype)
  mean = unit_mean(log_ratio, counted, units)
  return jax.lax.stop_gradient(mean - log_probs) + log_probs


def clipped_surrogate(
  log_ratio: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  clip_low: float,
  clip_high: Float[Array, "*shape"] | float,
  *,
  dual_clip: float | None = None,
) -> PolicyLoss:
  """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; for A < 0 at most ``-dual_clip A``.

  References: PPO 1707.06347; dual clip 1912.09729; separate bounds (DAPO) 2503.14476.
  """
  ratio = _ratio(log_ratio)
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
  hit = ratio * advantages > clipped * advantages
  if dual_clip is not None:
    floored = (advantages < 0) & (surrogate < dual_clip * advantages)
    surrogate = jnp.where(floored, dual_clip * advantages, surrogate)
    hit |= floored
  return PolicyLoss(-surrogate, ratio, hit)


def soft_gate(
  log_ratio: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  temperature_positive: float,
  temperature_negative: float,
) -> PolicyLoss:
  """``-(4 / tau) sigmoid(tau (r - 1)) A``: the update fades out; SAPO 2511.20347."""
  ratio = _ratio(log_ratio)
  tau = jnp.where(advantages > 0, temperature_positive, temperature_negative)
  gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
  return PolicyLoss(-gate * advantages, ratio, jnp.zeros(ratio.shape, bool))


def geometric_mean_surrogate(
  log_ratio: Float[Array, "batch time"],
  advantages: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  units: Int[Array, "batch time"],
  log_clip_low: float,
  log_clip_high: Float[Array, "batch time"] | float,
) -> PolicyLoss:
  """``-exp(mean_unit(clipped log r)) A``, each token clipped in the direction of its advantage.

  GMPO, 2507.20673; its bounds are on the log-ratio.
  """
  sign = jnp.sign(advantages)
  bounded = jnp.clip(log_ratio, -log_clip_low, log_clip_high)
  pessimistic = sign * jnp.minimum(sign * log_ratio, sign * bounded)
  counted = (weights > 0).astype(log_ratio.dtype)
  ratio = _ratio(unit_mean(pessimistic, counted, units))
  return PolicyLoss(-ratio * advantages, ratio, pessimistic != log_ratio)


def score_function(
  log_probs: Float[Array, "*shape"],
  log_ratio: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  clip_low: float,
  clip_high: Float[Array, "*shape"] | float,
  *,
  clip: str,
  positive_weight_one: bool,
) -> PolicyLoss:
  """``-sg(w(r)) A log pi``: every token keeps a gradient, the weight bounds its size.

  References: CISPO 2506.13585 ("ppo", "truncate"); TOPR 2503.14286 (positives at weight 1); MiniRL
  2512.01374 ("mask").
  """
  ratio = jax.lax.stop_gradient(_ratio(log_ratio))
  weight = ratio
  if clip == "ppo":
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  elif clip == "truncate":
    weight = jnp.minimum(ratio, 1.0 + clip_high)
  elif clip == "unit":
    weight = jnp.ones_like(ratio)
  elif clip == "mask":
    weight = jnp.where(_out_of_bounds(ratio, advantages, clip_low, clip_high), 0, ratio)
  hit = weight != ratio
  if positive_weight_one:
    positive = advantages > 0
    weight, hit = jnp.where(positive, 1, weight), hit & ~positive
  return PolicyLoss(-weight * advantages * log_probs, ratio, hit)


def covariance_selection(
  log_probs: Float[Array, "batch time"],
  advantages: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  fraction: float,
) -> Bool[Array, "batch time"]:
  """The ``fraction`` (at least one) of weighted tokens with the largest covariance term.

  The term is ``(A - mean A)(log pi - mean log pi)`` over the weighted tokens of the whole batch; a
  few such tokens carry most of the fall in entropy. Clip-Cov and KL-Cov, 2505.22617.
  """
  inside = weights > 0
  number = jnp.maximum(jnp.sum(inside), 1)

  def centred(values: Array) -> Array:
    values = jnp.where(inside, values, 0)
    return values - jnp.sum(values) / number

  term = jnp.where(inside, centred(advantages) * centred(log_probs), -jnp.inf)
  wanted = jnp.maximum(jnp.floor(fraction * number), 1).astype(jnp.int32)
  descending = jnp.sort(term.ravel())[::-1]
  return inside & (term >= descending[wanted - 1])


def _ratio(log_ratio: Array) -> Array:
  return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _out_of_bounds(ratio: Array, advantages: Array, low: float, high: Array | float) -> Array:
  return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def _masked(loss: PolicyLoss, inside: Array) -> PolicyLoss:
  return PolicyLoss(
    jnp.where(inside, loss.per_token, 0), jnp.where(inside, loss.ratio, 1), loss.clipped & inside
  )
