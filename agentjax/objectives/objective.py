"""What a loss is: a function of ``LossInputs``; what comes before it: ``prepare``.

A batch goes two ways. ``prepare`` runs once on the whole batch and computes everything that does
not depend on the parameters being updated: advantages, mismatch filter, denominators. An
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
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax import names
from agentjax.config import Config, ConfigError, check
from agentjax.objectives.advantage_function import (
  AdvantageFunction,
  AdvantageInputs,
  advantage_function,
  own_advantages,
  zero_outside,
)
from agentjax.objectives.advantages import (
  EVERY_PART,
  AdvantageConfig,
  AmbiguityConfig,
  ambiguity_terms,
  merge_branches,
  multi_reward_advantages,
  sequence_advantages,
)
from agentjax.objectives.aggregation import Aggregation, token_coefficients
from agentjax.objectives.distillation import DistillationConfig, teacher_advantages
from agentjax.objectives.function import (
  LossFunction,
  function_name,
  load_function,
  per_token_result,
  returns_per_token,
)
from agentjax.objectives.kl import kl_estimate
from agentjax.objectives.mismatch import mismatch_correction, mismatch_metrics
from agentjax.objectives.policy_loss import PolicyLossConfig, covariance_selection, policy_loss
from agentjax.objectives.preference import PreferenceConfig, preference_advantages
from agentjax.objectives.returns import (
  bilevel_gae,
  gae,
  length_adaptive_lambda,
  reward_to_go,
  whiten,
)
from agentjax.objectives.segments import (
  broadcast_to_tokens,
  first_of_unit,
  last_of_unit,
  sequence_sum,
  sequence_units,
  turn_units,
  unit_sum,
)
from agentjax.objectives.staged import StagedConfig, stage_corrections, staged_advantages
from agentjax.objectives.value_loss import ValueLossConfig, value_loss
from agentjax.trajectory.batch import Batch, abstract_batch, column_or_fill, token_columns
from agentjax.trajectory.columns import core_fields


@dataclasses.dataclass(unsafe_hash=True)
class ObjectiveConfig(Config):
  """A reinforcement-learning objective: how credit is given and what loss it enters.

  Attributes:
    advantage, policy_loss, value_loss: see there.
    distillation: adds a teacher's word on every token; None has no teacher.
    preference: takes the credit from DPO or an outcome's likelihood in the place of ``advantage``;
      None does not.
    staged: two updates of every turn of an episode (Agentic GRPO); None is one of all of it.
    ambiguity: advantages and the upper clip bound follow how far the answers to a task agree
      (ADPO); None does not.
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
  staged: StagedConfig | None = None
  ambiguity: AmbiguityConfig | None = None
  function: str | None = None
  with_reference: bool = False

  @classmethod
  def from_name(cls, name: str, path: str) -> Self:
    """A fresh copy of a preset, "default", or the ObjectiveConfig of ``module:attribute``."""
    from agentjax.objectives.presets import PRESETS  # they are built from this class

    if name == "default":
      return cls()
    allowed = f"'default', {', '.join(sorted(PRESETS))}, 'module:attribute' of an ObjectiveConfig"
    check(name in PRESETS or names.is_own(name), path, name, allowed)
    found = names.load(name, path, "an ObjectiveConfig") if names.is_own(name) else PRESETS[name]
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
    if self.staged is not None:
      self._validate_staged(self.staged, path)
    if self.ambiguity is not None:
      for where, name, permitted in (
        ("policy_loss", "clip", ("ppo", "mask", "truncate", "gmpo")),
        ("advantage", "credit", ("broadcast", "reward_to_go")),
      ):
        value = getattr(getattr(self, where), name)
        said = f"{' or '.join(map(repr, permitted))} with {path}.ambiguity"
        check(value in permitted, f"{path}.{where}.{name}", value, said)
      for name in ("preference", "function"):
        value = getattr(self, name)
        check(value is None, f"{path}.{name}", value, f"None with {path}.ambiguity")
    if self.preference is None:
      return
    # With anything else the update would not be the gradient of the loss that it is named after.
    for room, name, allowed in (
      (self.advantage, "centre", "none"),
      (self.advantage, "scale", "none"),
      (self.advantage, "credit", "broadcast"),
      (self.advantage, "whiten", False),
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
    for name in ("preference", "staged", "ambiguity"):
      value = getattr(self, name)
      check(value is None, f"{path}.{name}", value, "None with an advantage function")

  def _validate_staged(self, staged: StagedConfig, path: str) -> None:
    centres = ("group_mean", "group_median", "group_unique_mean", "leave_one_out")
    for part, name, allowed_values in (
      ("advantage", "centre", centres),
      ("advantage", "credit", ("broadcast",)),
      ("advantage", "parts", ((),)),
      ("advantage", "branches", ("soft",)),
      ("advantage", "whiten", (False,)),
      ("advantage", "clip", (None,)),
      ("advantage", "learn_from", ("all",)),
      ("policy_loss", "clip", ("ppo", "mask")),
      ("policy_loss", "covariance", ("none",)),
    ):
      value = getattr(getattr(self, part), name)
      allowed = " or ".join(repr(v) for v in allowed_values) + f" with {path}.staged"
      check(value in allowed_values, f"{path}.{part}.{name}", value, allowed)
    for name in ("distillation", "preference", "ambiguity", "function"):
      value = getattr(self, name)
      check(value is None, f"{path}.{name}", value, f"None with {path}.staged")
    mismatch = self.policy_loss.mismatch
    check(
      not mismatch.active,
      f"{path}.policy_loss.mismatch",
      mismatch,
      f"none with {path}.staged: ratios are to the policy that sampled",
    )
    for name in ("clip_low", "clip_high"):
      first, second = getattr(self.policy_loss, name), getattr(staged, f"correction_{name}")
      said = f"0 to {path}.policy_loss.{name}={first}"
      check(0 <= second <= first, f"{path}.staged.correction_{name}", second, said)

  def with_parts_of(self, shares: Mapping[str, float]) -> ObjectiveConfig:
    """A copy that names the parts of the reward where ``advantage.parts`` says "*".

    Args:
      shares: name and weight of each part of the reward.
    """
    if EVERY_PART not in self.advantage.parts:
      return self
    weighted = {name: weight for name, weight in shares.items() if weight}
    credit = dataclasses.replace(
      self.advantage, parts=tuple(weighted), part_weights=tuple(weighted.values())
    )
    return dataclasses.replace(self, advantage=credit)

  @property
  def correction(self) -> ObjectiveConfig:
    """What the second update of staged rollouts takes; only with ``staged``."""
    assert self.staged is not None
    return dataclasses.replace(self, policy_loss=self.staged.correction(self.policy_loss))

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
    return (
      self.needs_divergences
      and self.distillation is not None
      and self.function is None
      and self.distillation.outcome_weight == 0
      and loss.kl_coefficient == loss.entropy_coefficient == loss.positive_nll_coefficient == 0
      and loss.covariance == "none"
    )


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
    """[B, T, ...] of a registered column, its fill where the batch has none."""
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
  ) -> LossInputs:
    """Joins the outputs of the current parameters, which a gradient may flow into."""
    fixed = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return LossInputs(
      **fixed, log_probs=log_probs, entropies=entropies, values=values, divergences=divergences
    )


@flax.struct.dataclass(kw_only=True)
class LossInputs(Prepared):
  """What a loss sees: ``Prepared`` and the outputs of the current parameters.

  Attributes:
    log_probs: log pi of every token under the current policy, fp32, differentiable.
    entropies: of the distribution each token was drawn from, differentiable.
    values: the value head's output in the state in which each token was chosen, differentiable
      (with value_loss.kind "bernoulli" a logit); None without a head.
    divergences: of the distribution each token was drawn from and the teacher's, differentiable;
      None without one.
  """

  log_probs: Float[Array, "batch time"]
  entropies: Float[Array, "batch time"]
  values: Float[Array, "batch time"] | None = None
  divergences: Float[Array, "batch time"] | None = None


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
    return lambda inputs: _with_terms(inputs, config, _named_surrogate(inputs, config))
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
    result, sums = _with_terms(inputs, config, surrogate)
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
    total = jnp.where(_need(inputs.covariance_selected, "covariance_selected"), 0, total)
  if settings.covariance == "kl":
    moved = kl_estimate(log_probs, old_log_probs, "absolute")
    selected = _need(inputs.covariance_selected, "covariance_selected")
    total += settings.covariance_kl_coefficient * jnp.where(selected, moved, 0)
  if settings.kl_coefficient > 0:
    reference = jnp.where(inside, _need(inputs.reference_log_probs, "reference_log_probs"), 0)
    weight = None
    if settings.kl_weight == "current":
      weight = log_probs - jax.lax.stop_gradient(log_probs)
    elif settings.kl_weight == "behaviour":
      weight = log_probs - jnp.where(inside, inputs.behaviour_log_probs, 0)
    metrics["kl_reference"] = kl_estimate(log_probs, reference, settings.kl_estimator, weight)
    total += settings.kl_coefficient * metrics["kl_reference"]
  if settings.entropy_coefficient != 0:
    total -= settings.entropy_coefficient * entropies
  if settings.positive_nll_coefficient > 0:
    rewarded = _need(inputs.rewarded, "rewarded")
    total -= settings.positive_nll_coefficient * jnp.where(rewarded, log_probs, 0)
  if config.distillation is not None and config.needs_divergences:
    metrics["divergence"] = jnp.where(inside, _need(inputs.divergences, "divergences"), 0)
    total += config.distillation.coefficient * metrics["divergence"]

  result = jnp.sum(inputs.coefficients * total)
  sums = {name: jnp.sum(inputs.shares * value) for name, value in metrics.items()}
  sums["policy_loss"] = jnp.sum(inputs.coefficients * surrogate.per_token)
  # A critic that is a network of its own has a loss of its own, and neither stands here.
  with_head = inputs.values is not None or inputs.value_coefficients is not None
  if config.needs_values and with_head:
    coefficients = _need(inputs.value_coefficients, "value_coefficients")
    errors = value_loss(
      jnp.where(coefficients > 0, _need(inputs.values, "values"), 0),
      _need(inputs.returns, "returns"),
      config.value_loss,
      old_outputs=inputs.old_values,
    )
    sums["value_loss"] = jnp.sum(coefficients * errors)
    result += config.value_loss.coefficient * sums["value_loss"]
  return result, sums


def abstract_prepared(
  config: ObjectiveConfig, batch: Batch, *, recomputed: bool, token_rewards: bool
) -> Prepared:
  """Shapes and dtypes of what ``prepare`` returns for a batch of shapes and dtypes.

  Args:
    config: of the objective; functions of one's own are not looked at.
    batch: ``trajectory.batch.abstract_batch``.
    recomputed: old log-probs are the trainer's.
    token_rewards: there are rewards on tokens besides the outcome.
  """
  credit, taught = config.advantage, config.distillation
  tokens, sequences = batch.weights, batch.rewards
  parts: Any = jax.ShapeDtypeStruct((batch.num_sequences, len(credit.parts)), sequences.dtype)
  given = {
    "old_log_probs": (tokens, recomputed or config.needs_old_log_probs),
    "reference_log_probs": (tokens, config.needs_reference),
    "teacher_log_probs": (tokens, taught is not None and taught.form == "sampled"),
    "values": (tokens, config.needs_values),
    "token_rewards": (tokens, token_rewards),
    "turn_rewards": (tokens, bool(credit.turn_rewards)),
    "baselines": (sequences, config.needs_baseline),
    "consistency": (sequences, config.ambiguity is not None),
    "part_rewards": (parts, bool(credit.parts)),
  }
  extra = {name: shape for name, (shape, present) in given.items() if present}
  return jax.eval_shape(lambda b, e: prepare(b, config, **e)[0], batch, extra)


def abstract_inputs(config: ObjectiveConfig, rows: int, time: int) -> LossInputs:
  """Shapes and dtypes of what the objective of a run is given, to trace it without data."""
  batch = abstract_batch(rows, time, sequences=rows)
  plain = dataclasses.replace(
    config, advantage=dataclasses.replace(config.advantage, function=None)
  )
  prepared = abstract_prepared(plain, batch, recomputed=False, token_rewards=False)
  tokens = prepared.weights
  return prepared.with_scores(
    log_probs=tokens,
    entropies=tokens,
    values=tokens if config.needs_values else None,
    divergences=tokens if config.needs_divergences else None,
  )


def prepare(
  batch: Batch,
  config: ObjectiveConfig,
  *,
  old_log_probs: Float[Array, "batch time"] | None = None,
  reference_log_probs: Float[Array, "batch time"] | None = None,
  teacher_log_probs: Float[Array, "batch time"] | None = None,
  selected: Bool[Array, "batch time"] | None = None,
  values: Float[Array, "batch time"] | None = None,
  token_rewards: Float[Array, "batch time"] | None = None,
  turn_rewards: Float[Array, "batch time"] | None = None,
  baselines: Float[Array, "sequences"] | None = None,
  counts: Float[Array, "sequences"] | None = None,
  part_rewards: Float[Array, "sequences parts"] | None = None,
  consistency: Float[Array, "sequences"] | None = None,
  advantage: AdvantageFunction | None = None,
) -> tuple[Prepared, dict[str, Float[Array, ""]]]:
  """Computes what depends on the batch and not on the parameters being updated; once a batch.

  Args:
    batch: the whole batch. Sequences that are not valid lose their weight here.
    config: static.
    old_log_probs: the trainer's log-probs at the start of the update; None takes the sampler's, and
      the policy ratio then absorbs the mismatch (not with an active ``mismatch``).
    reference_log_probs: of the reference policy, where the config uses one.
    teacher_log_probs: of the tokens by their teacher, for ``distillation.form`` "sampled".
    selected: tokens that keep their weight; None is all of them.
    values: outputs of the value head, for credit "gae" and centre "prompt_value".
    token_rewards: rewards on tokens besides the outcome, for credit "reward_to_go" and "gae".
    turn_rewards: what tokens are paid of the outcome, for ``advantage.turn_rewards``; their sum is
      taken off the reward that stands at the end (``packing.paid_by_turn``).
    baselines: for centre "baseline". counts: see ``sequence_advantages``.
    part_rewards: values of ``advantage.parts``, in the place of ``batch.rewards``.
    consistency: share of the answers to each sequence's task that are its most frequent one, for
      ``ambiguity``.
    advantage: your own, in the place of ``config.advantage.function``.

  Returns:
    ``Prepared`` for the objective, and metrics of the whole batch (not sums).
  """
  settings, loss = config.advantage, config.policy_loss
  segment_ids = batch.segment_ids
  trained = broadcast_to_tokens(batch.valid.astype(batch.weights.dtype), segment_ids)
  weights = jnp.where(trained > 0, batch.weights, 0)
  if selected is not None:
    weights = jnp.where(selected, weights, 0)

  metrics: dict[str, Array] = {}
  if old_log_probs is not None:
    metrics |= mismatch_metrics(old_log_probs, batch.behaviour_log_probs, weights)
  else:
    if config.needs_old_log_probs:
      raise ValueError(
        "policy_loss.mismatch compares trainer with sampler and needs old_log_probs; pass them, "
        "or set weight_level='none', filter_level='none', veto_below=None."
      )
    old_log_probs = batch.behaviour_log_probs
  kept, importance, dropped = weights, jnp.ones_like(weights), None
  if loss.mismatch.active:
    importance, keep = mismatch_correction(
      old_log_probs,
      batch.behaviour_log_probs,
      weights,
      segment_ids,
      loss.mismatch,
      turns=batch.turns,
    )
    left = jnp.sum(jnp.where(keep, weights, 0)) / jnp.maximum(jnp.sum(weights), 1e-9)
    metrics["mismatch/kept"] = left
    if loss.mismatch.dropped == "exclude":
      kept = jnp.where(keep, weights, 0)
    elif loss.mismatch.drops:
      importance, dropped = jnp.where(keep, importance, 0), ~keep

  starts, bonus, columns = None, None, token_columns(batch)
  advantage = advantage_function(settings.function, advantage)
  if advantage is not None:
    core = {column.name: getattr(batch, column.name) for column in core_fields(AdvantageInputs)}
    inputs = AdvantageInputs(
      **core | {"weights": weights},
      old_log_probs=old_log_probs,
      turn_rewards=turn_rewards,
      token_rewards=token_rewards,
      reference_log_probs=reference_log_probs,
      columns=columns,
    )
    credit = _Credit(own_advantages(advantage, inputs))
    outcome = sequence_sum(jnp.abs(credit.advantages), segment_ids, batch.num_sequences)
  else:
    if settings.centre == "prompt_value":
      starts = _episode_starts(batch, weights)
      at_start = jnp.where(starts, config.value_loss.value(_need(values, "values")), 0)
      baselines = sequence_sum(at_start, segment_ids, batch.num_sequences)
    options = {
      "lengths": sequence_sum(
        (weights > 0).astype(weights.dtype), segment_ids, batch.num_sequences
      ),
      "baselines": baselines,
      "counts": counts,
    }
    if settings.parts:
      if EVERY_PART in settings.parts:
        raise ValueError(
          "advantage.parts=('*',) names no part; use ObjectiveConfig.with_parts_of()."
        )
      outcome = multi_reward_advantages(
        _need(part_rewards, "part_rewards"),
        jnp.asarray(settings.part_weights or (1.0,) * len(settings.parts), batch.rewards.dtype),
        batch.valid,
        batch.groups,
        settings,
        **options,
      )
    else:
      at_end = batch.rewards
      if settings.turn_rewards:
        turn_rewards = _need(turn_rewards, "turn_rewards")
        by_turn = sequence_sum(turn_rewards, segment_ids, batch.num_sequences)
        at_end = at_end - by_turn
        metrics["reward/by_turn"] = _mean(by_turn, batch.valid.astype(weights.dtype))
        token_rewards = turn_rewards if token_rewards is None else token_rewards + turn_rewards
      outcome = sequence_advantages(at_end, batch.valid, batch.groups, settings, **options)
    if config.preference is not None:
      reference = _need(reference_log_probs, "reference_log_probs")
      gained = jnp.where(weights > 0, weights * (old_log_probs - reference), 0)
      outcome, found = preference_advantages(
        sequence_sum(gained, segment_ids, batch.num_sequences),
        batch.rewards,
        # A sequence without weight has no likelihood to compare.
        batch.valid & (sequence_sum(weights, segment_ids, batch.num_sequences) > 0),
        batch.groups,
        config.preference,
      )
      metrics |= found
    if config.ambiguity is not None:
      consistency = _need(consistency, "consistency")
      minimum = config.ambiguity.minimum_scale
      scale, bonus = ambiguity_terms(consistency, minimum_scale=minimum)
      outcome, bonus = outcome * scale, broadcast_to_tokens(bonus, segment_ids)
      metrics["ambiguity/consistency"] = _mean(consistency, batch.valid.astype(weights.dtype))
    if settings.learn_from != "all":
      wanted = outcome < 0 if settings.learn_from == "negative" else outcome > 0
      wanted = broadcast_to_tokens(wanted.astype(weights.dtype), segment_ids) > 0
      weights, kept = jnp.where(wanted, weights, 0), jnp.where(wanted, kept, 0)
    credit = _credit(
      outcome, weights, batch, settings, old_log_probs, reference_log_probs, values, token_rewards
    )
    if starts is not None:
      credit = dataclasses.replace(
        credit,
        returns=jnp.where(starts, broadcast_to_tokens(batch.rewards, segment_ids), 0),
        value_coefficients=token_coefficients(
          starts.astype(weights.dtype), segment_ids, batch.num_sequences, mode="token_mean"
        ),
      )
  advantages = credit.advantages
  if settings.branches == "hard" and "branches" in batch.columns:
    advantages = merge_branches(advantages, weights, batch.columns["branches"])
  if settings.whiten:
    advantages = whiten(advantages, kept, ddof=settings.ddof)
  if settings.clip is not None:
    advantages = jnp.clip(advantages, -settings.clip, settings.clip)
  advantages *= settings.multiplier
  taught = config.distillation
  if taught is not None:
    advantages *= taught.outcome_weight
    if taught.form == "sampled":
      teacher = _need(teacher_log_probs, "teacher_log_probs")
      disagreement = teacher_advantages(teacher, old_log_probs, taught.clip)
      mean = _mean(disagreement, kept)
      metrics["distillation/advantage"] = mean
      if taught.centre == "batch_mean":
        disagreement -= mean
      advantages += taught.coefficient * disagreement
  advantages = jnp.where(kept > 0, advantages, 0)

  shares = token_coefficients(kept, segment_ids, batch.num_sequences, mode="token_mean")
  selected = None
  if loss.covariance != "none":
    selected = covariance_selection(old_log_probs, advantages, kept, loss.covariance_fraction)
  prepared = Prepared(
    advantages=advantages * importance,
    coefficients=token_coefficients(
      kept,
      segment_ids,
      batch.num_sequences,
      mode=loss.aggregation,
      constant=loss.aggregation_constant,
    ),
    shares=shares,
    weights=kept,
    segment_ids=segment_ids,
    turns=batch.turns,
    old_log_probs=old_log_probs,
    behaviour_log_probs=batch.behaviour_log_probs,
    reference_log_probs=reference_log_probs,
    clip_high_bonus=bonus,
    dropped=dropped,
    covariance_selected=selected,
    rewarded=broadcast_to_tokens(jnp.where(batch.valid, batch.rewards > 0, False), segment_ids),
    old_values=values,
    returns=credit.returns,
    value_coefficients=credit.value_coefficients,
    columns=columns,
  )
  learning = jnp.where(batch.valid, outcome != 0, False)
  metrics |= {
    "advantage/mean_abs": jnp.sum(shares * jnp.abs(advantages)),
    "advantage/learning_share": jnp.sum(learning) / jnp.maximum(jnp.sum(batch.valid), 1),
    "tokens/weighted": jnp.sum(kept > 0).astype(kept.dtype),
  }
  if loss.mismatch.active:
    metrics["mismatch/importance"] = jnp.sum(shares * importance)
  return jax.lax.stop_gradient((prepared, metrics))


def prepare_staged(
  batch: Batch,
  rewards: Float[Array, "sequences stages"],
  known: Bool[Array, "sequences stages"],
  stages: Int[Array, "batch time"],
  config: ObjectiveConfig,
  update: Literal["immediate", "correction"],
  **extra: Any,
) -> tuple[Prepared, dict[str, Float[Array, ""]]]:
  """``prepare`` for one of the two updates of staged rollouts (``staged``), config.staged set.

  The loss is ``policy_objective(config)`` for the first and ``policy_objective(config.correction)``
  for the second. Ratios are to the policy that sampled in both. Give the first update only the
  stages that were scored since the last, by ``known``, so that none has it twice.

  Args:
    batch: whole rollouts; ``batch.rewards`` are not looked at.
    rewards, known: of the stages of each sequence, in the order of ``batch.groups``.
    stages: the stage of every token, from 0; ``batch.turns`` where each stage is one turn. Tokens
      outside 0 ... stages - 1, and of stages that are not known, lose their weight.
    config: static.
    update: which of the two.
    extra: ``old_log_probs`` and ``reference_log_probs`` as in ``prepare``.
  """
  compute = staged_advantages if update == "immediate" else stage_corrections
  usable = known & batch.valid[:, None]
  own = compute(rewards, usable, batch.groups, config.advantage)
  if update == "correction":
    usable &= usable[:, -1:]
  sequence = jnp.maximum(batch.segment_ids - 1, 0)
  column = jnp.clip(stages, 0, rewards.shape[1] - 1)
  inside = (batch.segment_ids > 0) & (stages == column) & usable[sequence, column]
  prepared, metrics = prepare(batch, config, selected=inside, **extra)
  advantages = jnp.where(prepared.weights > 0, own[sequence, column], 0)
  metrics["advantage/mean_abs"] = jnp.sum(prepared.shares * jnp.abs(advantages))
  learning = jnp.where(usable, own != 0, False)
  metrics["advantage/learning_share"] = jnp.sum(learning) / jnp.maximum(jnp.sum(usable), 1)
  prepared = dataclasses.replace(prepared, advantages=advantages * config.advantage.multiplier)
  return jax.lax.stop_gradient((prepared, metrics))


def prepare_supervised(batch: Batch, aggregation: Aggregation = "token_mean") -> Prepared:
  """``Prepared`` for a likelihood loss: advantages 1, no rewards looked at, validity ignored."""
  coefficients = token_coefficients(
    batch.weights, batch.segment_ids, batch.num_sequences, mode=aggregation
  )
  return Prepared(
    advantages=jnp.where(batch.weights > 0, jnp.ones_like(batch.weights), 0),
    coefficients=coefficients,
    shares=token_coefficients(
      batch.weights, batch.segment_ids, batch.num_sequences, mode="token_mean"
    ),
    weights=batch.weights,
    segment_ids=batch.segment_ids,
    turns=batch.turns,
    old_log_probs=batch.behaviour_log_probs,
    behaviour_log_probs=batch.behaviour_log_probs,
    columns=token_columns(batch),
  )


@dataclasses.dataclass(frozen=True)
class _Credit:
  advantages: Array
  returns: Array | None = None
  value_coefficients: Array | None = None


def _credit(
  outcome: Array,
  weights: Array,
  batch: Batch,
  config: AdvantageConfig,
  old_log_probs: Array,
  reference_log_probs: Array | None,
  values: Array | None,
  token_rewards: Array | None,
) -> _Credit:
  """From one advantage a sequence to one a token."""
  segment_ids = batch.segment_ids
  if config.credit == "broadcast":
    if token_rewards is not None:
      raise ValueError(
        "advantage.credit='broadcast' has no place for token_rewards; set "
        "credit='reward_to_go' or 'gae'."
      )
    return _Credit(broadcast_to_tokens(outcome, segment_ids))

  ends = last_of_unit(weights, sequence_units(segment_ids))
  rewards = jnp.where(ends, broadcast_to_tokens(outcome, segment_ids), 0)
  if token_rewards is not None:
    rewards += token_rewards
  if config.kl_in_reward > 0:
    reference = _need(reference_log_probs, "reference_log_probs")
    penalty = kl_estimate(old_log_probs, reference, config.kl_in_reward_estimator)
    rewards -= config.kl_in_reward * jnp.where(weights > 0, penalty, 0)
  units = None if config.index_set == "token" else turn_units(segment_ids, batch.turns)
  if config.credit == "reward_to_go":
    return _Credit(reward_to_go(rewards, weights, segment_ids, gamma=config.gamma, units=units))

  values = _need(values, "values")
  lam: float | Array = config.gae_lambda
  if config.length_adaptive_lambda is not None:
    counted = (weights > 0).astype(weights.dtype)
    lengths = sequence_sum(counted, segment_ids, batch.num_sequences)
    lam = length_adaptive_lambda(
      broadcast_to_tokens(lengths, segment_ids), config.length_adaptive_lambda
    )

  by_turn = None if config.index_set == "turn_then_token" else units

  def advantages(lam: float | Array) -> Array:
    if units is not None and by_turn is None:
      return bilevel_gae(
        rewards,
        values,
        weights,
        segment_ids,
        units,
        gamma=config.gamma,
        lam=lam,
        unit_gamma=config.turn_gamma,
      )
    return gae(rewards, values, weights, segment_ids, gamma=config.gamma, lam=lam, units=by_turn)

  valued = weights > 0 if by_turn is None else first_of_unit(weights, by_turn)
  return _Credit(
    advantages=advantages(lam),
    returns=jnp.where(valued, advantages(config.value_lambda) + values, 0),
    value_coefficients=token_coefficients(
      valued.astype(weights.dtype), segment_ids, batch.num_sequences, mode="token_mean"
    ),
  )


def _episode_starts(batch: Batch, weights: Array) -> Array:
  """bool [B, T]: the policy's first token of every sequence that has weight.

  Weight rules may silence a first turn or weight a prompt, so they do not tell where it is.
  """
  units = sequence_units(batch.segment_ids)
  first = first_of_unit((batch.versions >= 0).astype(weights.dtype), units)
  return first & (unit_sum(weights, units) > 0)


def _mean(values: Array, weights: Array) -> Array:
  inside = weights > 0
  return jnp.sum(jnp.where(inside, weights * values, 0)) / jnp.maximum(jnp.sum(weights), 1e-9)


def _need(value: Array | None, name: str) -> Array:
  if value is None:
    raise ValueError(f"this objective needs {name}; pass it to prepare() or with_scores().")
  return value
