"""Correction for differences between sampler and trainer: weights and filters from their ratio rho.

rho = pi_old / pi_behaviour. pi_old is the policy at the start of the update as the trainer computes
it, pi_behaviour the one that sampled (other kernels, other precision, older weights). Neither
depends on the parameters being updated, so everything here is computed once a batch, before the
loss and its denominators.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import Config, ConfigError, PositiveFloat
from agentjax.objectives.kl import LOG_RATIO_LIMIT
from agentjax.objectives.segments import (
  sequence_units,
  unit_mean,
  unit_min,
  unit_sum,
  units_of,
)


@dataclasses.dataclass(unsafe_hash=True)
class MismatchConfig(Config):
  """Which tokens count, and how much, when sampler and trainer disagree.

  Attributes:
    weight_level: importance weight per "token", "turn" or "sequence"; "none" = 1.
    weight_cap: upper bound of the weight (truncated importance sampling); None = unbounded.
    weight_statistic: over a turn or sequence, "product" of the ratios (unbiased, variance explodes
      with length) or their "geometric" mean.
    filter_level: drop tokens, turns or sequences whose statistic leaves the bounds; "none" = keep.
    filter_low, filter_high: bounds, inclusive; None = open.
    filter_statistic: "geometric", "product", "k3": mean of ``rho - log rho - 1``, or
      "multiplicative_error": mean of ``exp|log rho|``, which is 1 where both agree (NeMo-RL's
      ``seq_logprob_error_threshold``).
    veto_below: drop a whole sequence with any token ratio below this (1e-4); None = off.
    dropped: how tokens enter that filter and veto drop. "count": their surrogate is 0, and they
      stay in every denominator and in all other terms (KL, entropy, likelihood), as in NeMo-RL and
      verl; the fewer are kept, the smaller is the step. "exclude": they get loss weight 0, so means
      are over the kept tokens.
    self_normalise: divide the weights by their mean over the kept tokens.

  Named rules: token-TIS weight_level="token", weight_cap=2. IcePop: weight_level="token",
  weight_cap=None, filter_level="token", bounds .5 and 5. Geometric rejection: filter_level=
  "sequence", bounds .999 and 1.001. IPA (2512.24873): filter_level="turn", filter_high=H.

  References: verl docs/algo/rollout_corr_math.md; IcePop (Ling Team 2025); LongCat 2509.18883.
  """

  weight_level: Literal["none", "token", "turn", "sequence"] = "none"
  weight_cap: PositiveFloat | None = 2.0
  weight_statistic: Literal["geometric", "product"] = "geometric"
  filter_level: Literal["none", "token", "turn", "sequence"] = "none"
  filter_low: float | None = None
  filter_high: PositiveFloat | None = None
  filter_statistic: Literal["geometric", "product", "k3", "multiplicative_error"] = "geometric"
  veto_below: PositiveFloat | None = None
  dropped: Literal["count", "exclude"] = "count"
  self_normalise: bool = False

  @property
  def active(self) -> bool:
    """Whether old log-probs must be recomputed by the trainer."""
    return self.weight_level != "none" or self.drops

  @property
  def drops(self) -> bool:
    """Whether a token may be dropped."""
    return self.filter_level != "none" or self.veto_below is not None

  def validate(self, path: str = "mismatch") -> None:
    super().validate(path)
    require = self.requirements(path)
    low, high = self.filter_low, self.filter_high
    if self.filter_level == "none" and (low is not None or high is not None):
      raise ConfigError(
        f"{path}.filter_low={self.filter_low} and {path}.filter_high={self.filter_high} have no "
        f"effect with {path}.filter_level='none'; set filter_level='token' | 'turn' | 'sequence'."
      )
    if self.filter_level != "none" and low is None and high is None:
      raise ConfigError(
        f"{path}.filter_level={self.filter_level!r} needs {path}.filter_low or "
        f"{path}.filter_high; both are None."
      )
    if low is not None and high is not None and low >= high:
      raise ConfigError(
        f"{path}.filter_low={self.filter_low} must be below {path}.filter_high={self.filter_high}."
      )
    require(
      self.drops or self.dropped == "count",
      "dropped",
      f"'count' without {path}.filter_level or {path}.veto_below: nothing is dropped",
    )
    if self.self_normalise and self.weight_level == "none":
      raise ConfigError(
        f"{path}.self_normalise=True has no effect with {path}.weight_level='none'; set "
        "weight_level or self_normalise=False."
      )


class Mismatch(NamedTuple):
  """The correction of every token; without gradient."""

  importance: Float[Array, "batch time"]  # factor on the loss; 1 where off
  keep: Bool[Array, "batch time"]  # False: dropped, see MismatchConfig.dropped


def mismatch_correction(
  old_log_probs: Float[Array, "batch time"],
  behaviour_log_probs: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  config: MismatchConfig,
  *,
  turns: Int[Array, "batch time"] | None = None,
) -> Mismatch:
  """Applies a ``MismatchConfig``; ratios of tokens without weight are ignored."""
  log_rho = jnp.where(weights > 0, old_log_probs - behaviour_log_probs, 0)
  importance, keep = jnp.ones_like(log_rho), jnp.ones(log_rho.shape, bool)

  if config.filter_level != "none":
    units = units_of(config.filter_level, segment_ids, turns)
    value = _statistic(log_rho, weights, units, config.filter_statistic)
    if config.filter_low is not None:
      keep &= value >= config.filter_low
    if config.filter_high is not None:
      keep &= value <= config.filter_high
  if config.veto_below is not None:
    lowest = unit_min(log_rho, weights, sequence_units(segment_ids))
    keep &= lowest >= jnp.log(config.veto_below)
  if config.weight_level != "none":
    units = units_of(config.weight_level, segment_ids, turns)
    importance = _statistic(log_rho, weights, units, config.weight_statistic)
    if config.weight_cap is not None:
      importance = jnp.minimum(importance, config.weight_cap)
  if config.self_normalise:
    counted = jnp.where(keep, weights, 0)
    total = jnp.sum(counted * importance)
    importance *= jnp.where(total > 0, jnp.sum(counted) / jnp.where(total > 0, total, 1), 1)
  return Mismatch(jax.lax.stop_gradient(importance), keep)


def _statistic(log_rho: Array, weights: Array, units: Array, statistic: str) -> Array:
  counted = (weights > 0).astype(log_rho.dtype)  # a ratio is no more likely for its loss weight
  if statistic == "k3":
    limited = jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return unit_mean(jnp.expm1(limited) - limited, counted, units)
  if statistic == "multiplicative_error":
    return unit_mean(jnp.exp(jnp.minimum(jnp.abs(log_rho), LOG_RATIO_LIMIT)), counted, units)
  if statistic == "product":
    exponent = unit_sum(log_rho * counted, units)
  else:
    exponent = unit_mean(log_rho, counted, units)
  return jnp.exp(jnp.clip(exponent, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
