"""What a loss is: a function of ``LossInputs``.

A batch goes two ways. ``preparation.prepare`` runs once on the whole batch and computes everything
that does not depend on the parameters being updated: advantages, mismatch filter, denominators. An
``Objective`` then sees the same rows, whole or in micro-batches, with the current log-probs, and
returns sums. Your own loss is any such function::

  def my_loss(inputs):
    ratio = jnp.exp(inputs.log_probs - inputs.old_log_probs)
    per_token = -jnp.minimum(ratio, 2.0) * inputs.advantages
    return jnp.sum(inputs.coefficients * per_token), {"ratio": jnp.sum(inputs.shares * ratio)}

It may also return the loss of every token, [B, T], and leave the sum to ``policy_objective``.
``agentjax.testing.check_objective(my_loss, seed=0)`` says whether it keeps the house's promises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax import names
from agentjax.config import Config, ConfigError, check, with_numbers
from agentjax.objectives.advantage_function import zero_outside
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.custom_loss import (
  LossFunction,
  function_name,
  load_function,
  per_token_result,
  returns_per_token,
)
from agentjax.objectives.distillation import DistillationConfig
from agentjax.objectives.kl import kl_estimate
from agentjax.objectives.policy_loss import PolicyLossConfig, policy_loss
from agentjax.objectives.preference import PreferenceConfig
from agentjax.objectives.value_loss import ValueLossConfig, value_loss
from agentjax.schedules import is_on, schedules_in
from agentjax.trajectory.batch import column_or_fill
from agentjax.trajectory.columns import ColumnError, get_column

_PRESETS = "agentjax.recipes.presets:PRESETS"


def preset(name: str) -> ObjectiveConfig:
  """A fresh copy of a named method's config, open to change until it is frozen.

  Raises:
    ConfigError: for an unknown name, listing all names.
  """
  return ObjectiveConfig.from_name(name, "preset")


@dataclasses.dataclass(unsafe_hash=True)
class ObjectiveConfig(Config):
  """A reinforcement-learning objective: how credit is given and what loss it enters.

  Attributes:
    advantage, policy_loss, value_loss: see there.
    distillation: adds a teacher's word on every token; None has no teacher.
    preference: takes the credit from DPO or an outcome's likelihood in the place of ``advantage``;
      None does not.
    function: your own loss, "module:function" (``load_function``), in the place of the surrogate
      that ``policy_loss`` names; None is that surrogate. See ``policy_objective``.
    with_reference: log-probs of the reference policy are computed even where no coefficient asks
      for them, for ``function``.
  """

  advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
  policy_loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
  value_loss: ValueLossConfig = dataclasses.field(default_factory=ValueLossConfig)
  distillation: DistillationConfig | None = None
  preference: PreferenceConfig | None = None
  function: str | None = None
  with_reference: bool = False

  @classmethod
  def from_name(cls, name: str, path: str) -> Self:
    """A fresh copy of "default", a preset, or an ObjectiveConfig by entry point or module."""
    if name == "default":
      return cls()
    presets = names.load(_PRESETS, path, "the published methods")
    points = names.entry_names({}, "agentjax.objectives")
    known = ", ".join(sorted({*presets, *points}))
    allowed = f"'default', {known}, 'module:attribute' of an ObjectiveConfig"
    target = points.get(name, name)
    check(name in presets or names.is_own(target), path, name, allowed)
    found = presets[name] if name in presets else names.load(target, path, "an ObjectiveConfig")
    if not isinstance(found, cls):
      raise names.wrong(name, path, found, allowed)
    return cls.from_dict(found.to_dict(), path)

  def validate(self, path: str = "objective") -> None:
    super().validate(path)
    if self.function is not None:
      names.check_name(self.function, f"{path}.function")
    if self.advantage.function is not None:
      self.check_own_advantage(path)
    if self.value_loss.kind == "bernoulli" and self.advantage.centre != "prompt_value":
      raise ConfigError(
        f"{path}.value_loss.kind='bernoulli' with {path}.advantage.centre="
        f"{self.advantage.centre!r}; allowed: centre='prompt_value', or value_loss.kind='squared'."
      )
    if self.preference is None:
      return
    # With anything else the update would not be the gradient of the loss that it is named after.
    for room, name, allowed in (
      (self.advantage, "centre", "none"),
      (self.advantage, "scale", "none"),
      (self.advantage, "credit", "broadcast"),
      (self.advantage, "whiten", False),
      (self.advantage, "terms", ()),
      (self.policy_loss, "gradient_form", "score"),
      (self.policy_loss, "clip", "unit"),
      (self.policy_loss, "aggregation", "sequence_mean_token_sum"),
    ):
      where = "advantage" if room is self.advantage else "policy_loss"
      value = getattr(room, name)
      said = f"{allowed!r} with {path}.preference, as in the presets 'dpo' and 'implicit_prm'"
      check(value == allowed, f"{path}.{where}.{name}", value, said)

  def check_own_advantage(self, path: str) -> None:
    """Raises ConfigError where an advantage function does not go with the rest."""
    self.advantage.check_own_function(f"{path}.advantage")
    none = "None with an advantage function"
    check(self.preference is None, f"{path}.preference", self.preference, none)

  @property
  def needs_reference(self) -> bool:
    """Whether log-probs of a reference policy must be computed."""
    asked = self.advantage.needs_reference or self.policy_loss.needs_reference
    return asked or self.with_reference or self.preference is not None

  @property
  def needs_values(self) -> bool:
    """Whether a value head must be trained."""
    return self.advantage.needs_values

  @property
  def needs_baseline(self) -> bool:
    """Whether every group has a greedy episode that it is compared with."""
    return self.advantage.centre == "baseline"

  @property
  def needs_old_log_probs(self) -> bool:
    """Whether the trainer must recompute log-probs before the update, apart from the sampler's."""
    return self.policy_loss.mismatch.active

  @property
  def needs_divergences(self) -> bool:
    """Whether the loss takes divergences from a teacher, see ``DistillationConfig.form``."""
    return self.distillation is not None and self.distillation.form != "sampled"

  @property
  def only_divergences(self) -> bool:
    """Whether the log-probs of the sampled tokens have no part in the loss."""
    loss = self.policy_loss
    terms = (loss.kl_coefficient, loss.entropy_coefficient, loss.positive_nll_coefficient)
    return (
      self.needs_divergences
      and self.distillation is not None
      and self.function is None
      and not any(map(is_on, (self.distillation.outcome_weight, *terms)))
      and loss.covariance == "none"
    )

  def at(self, numbers: Mapping[str, Array]) -> ObjectiveConfig:
    """With these numbers in the place of its schedules, by dotted name from here on; a traced
    number makes no new program."""
    return with_numbers(self, lambda name, _: needed(numbers.get(name), f"the number {name}"))

  @property
  def abstract_numbers(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what ``at`` takes."""
    return dict.fromkeys(schedules_in(self), jax.ShapeDtypeStruct((), jnp.float32))


@flax.struct.dataclass(kw_only=True)
class Prepared:
  """All that a loss may use and current parameters do not change: [B, T] arrays, cut by rows.

  Attributes:
    advantages: credit times importance weight; 0 where the weight is 0.
    coefficients: the loss is ``sum(coefficients * per_token)`` over all rows of the batch.
    shares: weight over the batch's total weight; a metric is ``sum(shares * per_token)``.
    weights: loss weights, 0 for invalid sequences and for tokens that the mismatch filter excludes.
    segment_ids, turns: as in ``Batch``.
    old_log_probs: policy at the start of the update; behaviour_log_probs: policy that sampled.
    reference_log_probs: frozen reference policy.
    clip_high_bonus: added to the upper clip bound.
    dropped: bool, tokens whose surrogate the mismatch filter makes 0 while they keep their weight
      (``MismatchConfig.dropped`` "count"); None where there are none.
    covariance_selected: bool, tokens that Clip-Cov and KL-Cov act on.
    rewarded: bool, tokens of sequences whose reward is above 0.
    old_values, returns, value_coefficients: outputs of the value head at the start, their targets
      and the coefficients of its loss.
    columns: by name [B, T, ...], the registered columns of the batch that losses are given
      (``trajectory.columns``); a sequence's value stands on all its tokens. See ``column``.
  """

  advantages: Float[Array, "batch time"]
  coefficients: Float[Array, "batch time"]
  shares: Float[Array, "batch time"]
  weights: Float[Array, "batch time"]
  segment_ids: Int[Array, "batch time"]
  turns: Int[Array, "batch time"]
  old_log_probs: Float[Array, "batch time"]
  behaviour_log_probs: Float[Array, "batch time"]
  reference_log_probs: Float[Array, "batch time"] | None = None
  clip_high_bonus: Float[Array, "batch time"] | None = None
  dropped: Bool[Array, "batch time"] | None = None
  covariance_selected: Bool[Array, "batch time"] | None = None
  rewarded: Bool[Array, "batch time"] | None = None
  old_values: Float[Array, "batch time"] | None = None
  returns: Float[Array, "batch time"] | None = None
  value_coefficients: Float[Array, "batch time"] | None = None
  columns: dict[str, Array] = dataclasses.field(default_factory=dict)

  def column(self, name: str) -> Array:
    """[B, T, ...] of a registered column, its fill where the batch has none.

    Raises:
      ColumnError: one that losses are not given (``Column.in_loss``): its fill would not be true.
    """
    if not get_column(name).in_loss:
      raise ColumnError(
        f"losses are not given the column {name!r}; allowed: columns with in_loss=True, and what "
        "LossInputs has as an attribute."
      )
    return column_or_fill(self.columns, name, self.weights.shape)

  def scaled(self, factor: float) -> Prepared:
    """With a loss that is ``factor`` times as large."""
    values = self.value_coefficients
    return dataclasses.replace(
      self,
      coefficients=factor * self.coefficients,
      value_coefficients=None if values is None else factor * values,
    )

  def without_targets(self) -> Prepared:
    """Without what a value head learns from."""
    return dataclasses.replace(self, old_values=None, returns=None, value_coefficients=None)

  def with_scores(
    self,
    log_probs: Float[Array, "batch time"],
    entropies: Float[Array, "batch time"],
    values: Float[Array, "batch time"] | None = None,
    divergences: Float[Array, "batch time"] | None = None,
    numbers: Mapping[str, Array] | None = None,
  ) -> LossInputs:
    """Joins the outputs of the current parameters, which a gradient may flow into, and numbers."""
    fixed = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return LossInputs(
      **fixed,
      log_probs=log_probs,
      entropies=entropies,
      values=values,
      divergences=divergences,
      numbers=dict(numbers or {}),
    )


@flax.struct.dataclass(kw_only=True)
class LossInputs(Prepared):
  """What a loss sees: ``Prepared`` and the outputs of the current parameters.

  Attributes:
    log_probs: log pi of every token under the current policy, fp32, differentiable.
    entropies: of the distribution each token was drawn from, differentiable.
    values: the value head's output in the state in which each token was chosen, differentiable
      (with value_loss.kind "bernoulli" a logit); None without a head.
    divergences: of the distribution each token was drawn from and the teacher's, or the loss over
      its candidates (``distillation.candidate_loss``), differentiable; None without a teacher.
    numbers: those of the schedules in the objective at this step, by dotted name, such as
      "policy_loss.kl_coefficient".
  """

  log_probs: Float[Array, "batch time"]
  entropies: Float[Array, "batch time"]
  values: Float[Array, "batch time"] | None = None
  divergences: Float[Array, "batch time"] | None = None
  numbers: dict[str, Array] = dataclasses.field(default_factory=dict)


Objective: TypeAlias = Callable[[LossInputs], tuple[Array, dict[str, Array]]]
"""``(sum of coefficients * per_token, metrics)``; metrics are sums too: micro-batches add up."""


def policy_objective(config: ObjectiveConfig, function: LossFunction | None = None) -> Objective:
  """The loss that a config names: surrogate, KL, entropy, likelihood, divergence and value terms.

  A function of your own is called in one of two ways, by what it returns:

  * ``per_token``, [B, T], or ``(per_token, metrics)`` with metrics [B, T]: it takes the place of
    the surrogate. Every array that it is given is 0 on tokens without weight, the other terms of
    the config are added, and coefficients and shares sum up. ``policy_loss.ratio_level``,
    ``gradient_form``, ``clip`` and their bounds are not read.
  * ``(loss, metrics)``, scalars: it is the whole objective, and given the arrays as they are.

  Args:
    config: see ObjectiveConfig.
    function: your own, in the place of ``config.function``.

  Raises:
    ConfigError: ``config.function`` cannot be imported or takes other arguments. The objective
      raises it where the function cannot be traced, or returns something else.
  """
  if function is None and config.function is not None:
    function = load_function(config.function)
  if function is None:

    def named(inputs: LossInputs) -> tuple[Array, dict[str, Array]]:
      now = config.at(inputs.numbers)
      return _with_terms(inputs, now, _named_surrogate(inputs, now))

    return named
  own, name = function, function_name(function, config.function)

  def objective(inputs: LossInputs) -> tuple[Array, dict[str, Array]]:
    if not returns_per_token(own, inputs, name):
      return own(inputs)
    inside = inputs.weights > 0
    clean = jax.tree.map(lambda x: zero_outside(inside, x), inputs)
    per_token, metrics = per_token_result(own(clean))
    wrong = jnp.sum(inside & ~jnp.isfinite(per_token)).astype(jnp.float32)
    counted = inside if inputs.dropped is None else inside & ~inputs.dropped
    surrogate = _Surrogate(
      jnp.where(counted, per_token, 0), {k: jnp.where(inside, v, 0) for k, v in metrics.items()}
    )
    result, sums = _with_terms(inputs, config.at(inputs.numbers), surrogate)
    return result, sums | {"nonfinite/per_token": wrong}

  return objective


class _Surrogate(NamedTuple):
  """Loss of every token, and metrics of every token."""

  per_token: Array
  metrics: dict[str, Array]


def _named_surrogate(inputs: LossInputs, config: ObjectiveConfig) -> _Surrogate:
  """The one that ``config.policy_loss`` says."""
  if config.only_divergences:
    # Their gradient is 0; said here, it is not computed.
    inputs = dataclasses.replace(inputs, log_probs=jax.lax.stop_gradient(inputs.log_probs))
  loss = policy_loss(
    inputs.log_probs,
    inputs.old_log_probs,
    inputs.advantages,
    inputs.weights,
    inputs.segment_ids,
    config.policy_loss,
    turns=inputs.turns,
    clip_high_bonus=0.0 if inputs.clip_high_bonus is None else inputs.clip_high_bonus,
  )
  return _Surrogate(loss.per_token, {"ratio": loss.ratio, "clip_fraction": loss.clipped})


def _with_terms(
  inputs: LossInputs, config: ObjectiveConfig, surrogate: _Surrogate
) -> tuple[Array, dict[str, Array]]:
  """The sum of a surrogate and of all that a config adds to it, and the sums of metrics."""
  settings = config.policy_loss
  if config.only_divergences:
    # Their gradient is 0; said here, it is not computed.
    inputs = dataclasses.replace(inputs, log_probs=jax.lax.stop_gradient(inputs.log_probs))
  inside = inputs.weights > 0
  log_probs = jnp.where(inside, inputs.log_probs, 0)
  old_log_probs = jnp.where(inside, inputs.old_log_probs, 0)
  entropies = jnp.where(inside, inputs.entropies, 0)
  total = surrogate.per_token
  metrics = {"kl_old": old_log_probs - log_probs, "entropy": entropies} | surrogate.metrics
  if settings.covariance == "clip":
    total = jnp.where(needed(inputs.covariance_selected, "covariance_selected"), 0, total)
  if settings.covariance == "kl":
    moved = kl_estimate(log_probs, old_log_probs, "absolute")
    selected = needed(inputs.covariance_selected, "covariance_selected")
    total += settings.covariance_kl_coefficient * jnp.where(selected, moved, 0)
  if is_on(settings.kl_coefficient):
    reference = jnp.where(inside, needed(inputs.reference_log_probs, "reference_log_probs"), 0)
    weight = None
    if settings.kl_weight == "current":
      weight = log_probs - jax.lax.stop_gradient(log_probs)
    elif settings.kl_weight == "behaviour":
      weight = log_probs - jnp.where(inside, inputs.behaviour_log_probs, 0)
    metrics["kl_reference"] = kl_estimate(log_probs, reference, settings.kl_estimator, weight)
    total += settings.kl_coefficient * metrics["kl_reference"]
  if is_on(settings.entropy_coefficient):
    total -= settings.entropy_coefficient * entropies
  if is_on(settings.positive_nll_coefficient):
    rewarded = needed(inputs.rewarded, "rewarded")
    total -= settings.positive_nll_coefficient * jnp.where(rewarded, log_probs, 0)
  if config.distillation is not None and config.needs_divergences:
    name = "divergence" if config.distillation.candidate_loss is None else "candidate_loss"
    metrics[name] = jnp.where(inside, needed(inputs.divergences, "divergences"), 0)
    total += config.distillation.coefficient * metrics[name]

  result = jnp.sum(inputs.coefficients * total)
  sums = {name: jnp.sum(inputs.shares * value) for name, value in metrics.items()}
  sums["policy_loss"] = jnp.sum(inputs.coefficients * surrogate.per_token)
  # A critic that is a network of its own has a loss of its own, and neither stands here.
  with_head = inputs.values is not None or inputs.value_coefficients is not None
  if config.needs_values and with_head:
    coefficients = needed(inputs.value_coefficients, "value_coefficients")
    errors = value_loss(
      jnp.where(coefficients > 0, needed(inputs.values, "values"), 0),
      needed(inputs.returns, "returns"),
      config.value_loss,
      old_outputs=inputs.old_values,
    )
    sums["value_loss"] = jnp.sum(coefficients * errors)
    result += config.value_loss.coefficient * sums["value_loss"]
  return result, sums


def needed(value: Array | None, name: str) -> Array:
  """The array; raises ValueError where it was not given."""
  if value is None:
    raise ValueError(f"this objective needs {name}; pass it to prepare() or with_scores().")
  return value
