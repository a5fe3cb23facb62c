"""What comes before a loss: ``prepare`` turns a batch into the fixed inputs of an objective.

The way of the credit: token weights and mismatch rules, one advantage a sequence, its spread over
the tokens, then whitening, clipping and what a teacher adds. It runs once a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.objectives.advantage_function import (
  AdvantageFunction,
  advantage_inputs,
  own_advantages,
)
from agentjax.objectives.advantages import (
  AdvantageConfig,
  sequence_advantages,
)
from agentjax.objectives.aggregation import Aggregation, token_coefficients
from agentjax.objectives.columns import CREDIT, columns_read
from agentjax.objectives.distillation import teacher_advantages
from agentjax.objectives.kl import kl_estimate
from agentjax.objectives.mismatch import mismatch_correction
from agentjax.objectives.objective import LossInputs, ObjectiveConfig, Prepared, needed
from agentjax.objectives.policy_loss import covariance_selection
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
from agentjax.schedules import is_on
from agentjax.trajectory.batch import Batch, abstract_batch, abstract_column, token_columns


def prepare(
  batch: Batch,
  config: ObjectiveConfig,
  *,
  advantage: AdvantageFunction | None = None,
  numbers: Mapping[str, Array] | None = None,
  **columns: Array | None,
) -> tuple[Prepared, dict[str, Float[Array, ""]]]:
  """Computes what depends on the batch and not on the parameters being updated; once a batch.

  Columns of the batch that it reads, besides the core ones (``objectives.columns``):

  * ``old_log_probs``: the trainer's at the start of the update. Without them the sampler's stand
    there, and the policy ratio absorbs the mismatch (not with an active ``mismatch``).
  * ``reference_log_probs``, where the config uses a reference policy.
  * ``teacher_log_probs``, for ``distillation.form`` "sampled".
  * ``selected``: tokens that keep their weight; all without it.
  * ``values``: outputs of a critic, for credit "gae" and centre "prompt_value".
  * ``token_rewards``: on tokens besides the outcome, for credit "reward_to_go" and "gae".
  * ``turn_rewards``: what tokens are paid of the outcome, for ``advantage.turn_rewards``; their sum
    is taken off the reward that stands at the end.
  * ``baselines`` for centre "baseline"; those that ``advantage.terms`` read.

  Args:
    batch: the whole batch. Sequences that are not valid lose their weight here.
    config: static.
    advantage: your own, in the place of ``config.advantage.function``.
    numbers: in the place of the schedules in ``config`` (``ObjectiveConfig.at``).
    columns: by name, beside those of the batch or in their place; None is none.

  Returns:
    ``Prepared`` for the objective, and metrics of the whole batch (not sums).
  """
  config = config.at(numbers or {})
  batch = batch.with_columns({k: v for k, v in columns.items() if v is not None})
  given = _Given.of(batch)
  tokens, metrics = _weigh_tokens(batch, config, given)
  own = config.advantage.function if advantage is None else advantage
  if own is not None:
    credit = _own_credit(own, batch, tokens)
  else:
    tokens, credit, found = _named_credit(batch, config, tokens, given)
    metrics |= found
  advantages, bonus, found = _final_advantages(batch, config, tokens, credit)
  metrics |= found
  prepared = _join(batch, config, tokens, credit, advantages, bonus, given)
  learning = jnp.where(batch.valid, credit.outcome != 0, False)
  metrics |= {
    "advantage/mean_abs": jnp.sum(prepared.shares * jnp.abs(advantages)),
    "advantage/learning_share": jnp.sum(learning) / jnp.maximum(jnp.sum(batch.valid), 1),
    "tokens/weighted": jnp.sum(tokens.kept > 0).astype(tokens.kept.dtype),
  }
  if "replayed" in batch.columns:
    metrics["tokens/replayed"] = jnp.sum(prepared.shares * prepared.column("replayed"))
  if config.policy_loss.mismatch.active:
    metrics["mismatch/importance"] = jnp.sum(prepared.shares * tokens.importance)
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
    columns=token_columns(batch.for_loss()),
  )


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
  asked = columns_read(config, recomputed=recomputed, token_rewards=token_rewards)
  extra = {column.name: abstract_column(batch, column) for column in asked}
  shapes = batch.with_columns(extra), config.abstract_numbers
  return jax.eval_shape(lambda b, n: prepare(b, config, numbers=n)[0], *shapes)


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
    numbers=config.abstract_numbers,  # type: ignore[arg-type]
  )


class _Given(NamedTuple):
  """The columns of ``CREDIT``, each None where the batch has none; some are replaced on the way."""

  old_log_probs: Array | None
  reference_log_probs: Array | None
  values: Array | None
  token_rewards: Array | None
  turn_rewards: Array | None
  selected: Array | None
  baselines: Array | None

  @classmethod
  def of(cls, batch: Batch) -> Self:
    return cls(**{column.name: batch.columns.get(column.name) for column in CREDIT})


@dataclasses.dataclass(frozen=True)
class _Tokens:
  """What tokens weigh, [B, T].

  Attributes:
    old_log_probs: of the policy at the start of the update.
    weights: 0 for sequences that are not valid and tokens that are not selected.
    kept: those of ``weights`` that the mismatch filter does not exclude.
    importance: factor of every advantage.
    dropped: as in ``Prepared``.
  """

  old_log_probs: Array
  weights: Array
  kept: Array
  importance: Array
  dropped: Array | None = None

  def only(self, wanted: Array) -> _Tokens:
    """A copy in which the other tokens have no weight."""
    return dataclasses.replace(
      self,
      weights=jnp.where(wanted, self.weights, 0),
      kept=jnp.where(wanted, self.kept, 0),
    )


@dataclasses.dataclass(frozen=True)
class _Credit:
  """Advantages [B, T] before they are whitened, clipped and mixed with a teacher's.

  Attributes:
    outcome: [sequences], what they were made of; 0 where a sequence teaches nothing.
    returns, value_coefficients: as in ``Prepared``.
  """

  advantages: Array
  outcome: Array
  returns: Array | None = None
  value_coefficients: Array | None = None


def _weigh_tokens(
  batch: Batch, config: ObjectiveConfig, given: _Given
) -> tuple[_Tokens, dict[str, Array]]:
  """Weights of the tokens after validity, selection and the mismatch rules, and metrics."""
  mismatch, segment_ids = config.policy_loss.mismatch, batch.segment_ids
  trained = broadcast_to_tokens(batch.valid.astype(batch.weights.dtype), segment_ids)
  weights = jnp.where(trained > 0, batch.weights, 0)
  if given.selected is not None:
    weights = jnp.where(given.selected, weights, 0)
  metrics: dict[str, Array] = {}
  old_log_probs = given.old_log_probs
  if old_log_probs is None and config.needs_old_log_probs:
    raise ValueError(
      "policy_loss.mismatch compares trainer with sampler and needs old_log_probs; pass them, "
      "or set weight_level='none', filter_level='none', veto_below=None."
    )
  if old_log_probs is None:
    old_log_probs = batch.behaviour_log_probs
  tokens = _Tokens(old_log_probs, weights, weights, jnp.ones_like(weights))
  if not mismatch.active:
    return tokens, metrics
  importance, keep = mismatch_correction(
    old_log_probs, batch.behaviour_log_probs, weights, segment_ids, mismatch, turns=batch.turns
  )
  left = jnp.sum(jnp.where(keep, weights, 0)) / jnp.maximum(jnp.sum(weights), 1e-9)
  metrics["mismatch/kept"] = left
  tokens = dataclasses.replace(tokens, importance=importance)
  if mismatch.dropped == "exclude":
    tokens = dataclasses.replace(tokens, kept=jnp.where(keep, weights, 0))
  elif mismatch.drops:
    importance = jnp.where(keep, importance, 0)
    tokens = dataclasses.replace(tokens, importance=importance, dropped=~keep)
  return tokens, metrics


def _own_credit(function: AdvantageFunction, batch: Batch, tokens: _Tokens) -> _Credit:
  """The advantages of a user's function."""
  inputs = advantage_inputs(batch, tokens.weights, tokens.old_log_probs)
  advantages = own_advantages(function, inputs)
  size = sequence_sum(jnp.abs(advantages), batch.segment_ids, batch.num_sequences)
  return _Credit(advantages, outcome=size)


def _named_credit(
  batch: Batch, config: ObjectiveConfig, tokens: _Tokens, given: _Given
) -> tuple[_Tokens, _Credit, dict[str, Array]]:
  """The advantages that the config names, the tokens that learn from them, and metrics."""
  settings, weights, segment_ids = config.advantage, tokens.weights, batch.segment_ids
  starts = None
  if settings.centre == "prompt_value":
    starts = _episode_starts(batch, weights)
    at_start = jnp.where(starts, config.value_loss.value(needed(given.values, "values")), 0)
    baselines = sequence_sum(at_start, segment_ids, batch.num_sequences)
    given = given._replace(baselines=baselines)
  outcome, token_rewards, metrics = _sequence_outcome(batch, settings, weights, given)
  given = given._replace(token_rewards=token_rewards)
  if config.preference is not None:
    outcome, found = _preferred(batch, config.preference, tokens, given)
    metrics |= found
  if settings.learn_from != "all":
    wanted = outcome < 0 if settings.learn_from == "negative" else outcome > 0
    tokens = tokens.only(broadcast_to_tokens(wanted.astype(weights.dtype), segment_ids) > 0)
  credit = _spread(outcome, tokens, batch, settings, given)
  if starts is not None:
    credit = dataclasses.replace(
      credit,
      returns=jnp.where(starts, broadcast_to_tokens(batch.rewards, segment_ids), 0),
      value_coefficients=token_coefficients(
        starts.astype(weights.dtype), segment_ids, batch.num_sequences, mode="token_mean"
      ),
    )
  return tokens, credit, metrics


def _sequence_outcome(
  batch: Batch, settings: AdvantageConfig, weights: Array, given: _Given
) -> tuple[Array, Array | None, dict[str, Array]]:
  """One advantage a sequence, the rewards that stand on tokens besides, and metrics."""
  segment_ids, token_rewards = batch.segment_ids, given.token_rewards
  counted = (weights > 0).astype(weights.dtype)
  options = {
    "lengths": sequence_sum(counted, segment_ids, batch.num_sequences),
    "baselines": given.baselines,
  }
  at_end, metrics = batch.rewards, {}
  if settings.turn_rewards:
    turn_rewards = needed(given.turn_rewards, "turn_rewards")
    by_turn = sequence_sum(turn_rewards, segment_ids, batch.num_sequences)
    at_end = at_end - by_turn
    metrics["reward/by_turn"] = _mean(by_turn, batch.valid.astype(weights.dtype))
    token_rewards = turn_rewards if token_rewards is None else token_rewards + turn_rewards
  outcome = sequence_advantages(at_end, batch.valid, batch.groups, settings, **options)
  return outcome, token_rewards, metrics


def _preferred(
  batch: Batch, config: PreferenceConfig, tokens: _Tokens, given: _Given
) -> tuple[Array, dict[str, Array]]:
  """One advantage a sequence by how likely the policy finds it beside others, and metrics."""
  weights, segment_ids = tokens.weights, batch.segment_ids
  reference = needed(given.reference_log_probs, "reference_log_probs")
  gained = jnp.where(weights > 0, weights * (tokens.old_log_probs - reference), 0)
  return preference_advantages(
    sequence_sum(gained, segment_ids, batch.num_sequences),
    batch.rewards,
    # A sequence without weight has no likelihood to compare.
    batch.valid & (sequence_sum(weights, segment_ids, batch.num_sequences) > 0),
    batch.groups,
    config,
  )


def _spread(
  outcome: Array, tokens: _Tokens, batch: Batch, config: AdvantageConfig, given: _Given
) -> _Credit:
  """From one advantage a sequence to one a token."""
  segment_ids, weights, token_rewards = batch.segment_ids, tokens.weights, given.token_rewards
  if config.credit == "broadcast":
    if token_rewards is not None:
      raise ValueError(
        "advantage.credit='broadcast' has no place for token_rewards; set "
        "credit='reward_to_go' or 'gae'."
      )
    return _Credit(broadcast_to_tokens(outcome, segment_ids), outcome)

  ends = last_of_unit(weights, sequence_units(segment_ids))
  rewards = jnp.where(ends, broadcast_to_tokens(outcome, segment_ids), 0)
  if token_rewards is not None:
    rewards += token_rewards
  if is_on(config.kl_in_reward):
    reference = needed(given.reference_log_probs, "reference_log_probs")
    penalty = kl_estimate(tokens.old_log_probs, reference, config.kl_in_reward_estimator)
    rewards -= config.kl_in_reward * jnp.where(weights > 0, penalty, 0)
  units = None if config.index_set == "token" else turn_units(segment_ids, batch.turns)
  if config.credit == "reward_to_go":
    to_go = reward_to_go(rewards, weights, segment_ids, gamma=config.gamma, units=units)
    return _Credit(to_go, outcome)

  values = needed(given.values, "values")
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
    outcome=outcome,
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


def _final_advantages(
  batch: Batch,
  config: ObjectiveConfig,
  tokens: _Tokens,
  credit: _Credit,
) -> tuple[Array, Array | None, dict[str, Array]]:
  """Advantages whitened, clipped, changed by terms, scaled and mixed with a teacher's; what terms
  add to the upper clip bound; metrics."""
  settings, taught = config.advantage, config.distillation
  advantages, kept = credit.advantages, tokens.kept
  metrics: dict[str, Array] = {}
  if settings.whiten:
    advantages = whiten(advantages, kept, ddof=settings.ddof)
  if settings.clip is not None:
    advantages = jnp.clip(advantages, -settings.clip, settings.clip)
  bonus: Array | None = None
  if settings.terms:
    inputs = advantage_inputs(batch, tokens.weights, tokens.old_log_probs)
    for term in settings.terms:
      advantages, more = term(inputs, advantages), term.clip_high_bonus(inputs)
      if more is not None:
        bonus = more if bonus is None else bonus + more
  advantages *= settings.multiplier
  if taught is not None:
    advantages *= taught.outcome_weight
    if taught.form == "sampled":
      teacher = needed(batch.columns.get("teacher_log_probs"), "teacher_log_probs")
      disagreement = teacher_advantages(teacher, tokens.old_log_probs, taught.clip)
      mean = _mean(disagreement, kept)
      metrics["distillation/advantage"] = mean
      if taught.centre == "batch_mean":
        disagreement -= mean
      advantages += taught.coefficient * disagreement
  return jnp.where(kept > 0, advantages, 0), bonus, metrics


def _join(
  batch: Batch,
  config: ObjectiveConfig,
  tokens: _Tokens,
  credit: _Credit,
  advantages: Array,
  clip_high_bonus: Array | None,
  given: _Given,
) -> Prepared:
  """Everything that a loss is given, with the denominators of ``policy_loss.aggregation``."""
  loss, segment_ids, kept = config.policy_loss, batch.segment_ids, tokens.kept
  coefficients = token_coefficients(
    kept,
    segment_ids,
    batch.num_sequences,
    mode=loss.aggregation,
    constant=loss.aggregation_constant,
  )
  selected = None
  if loss.covariance != "none":
    selected = covariance_selection(
      tokens.old_log_probs, advantages, kept, loss.covariance_fraction
    )
  return Prepared(
    advantages=advantages * tokens.importance,
    coefficients=coefficients,
    shares=token_coefficients(kept, segment_ids, batch.num_sequences, mode="token_mean"),
    weights=kept,
    segment_ids=segment_ids,
    turns=batch.turns,
    old_log_probs=tokens.old_log_probs,
    behaviour_log_probs=batch.behaviour_log_probs,
    reference_log_probs=given.reference_log_probs,
    clip_high_bonus=clip_high_bonus,
    dropped=tokens.dropped,
    covariance_selected=selected,
    rewarded=broadcast_to_tokens(jnp.where(batch.valid, batch.rewards > 0, False), segment_ids),
    old_values=given.values,
    returns=credit.returns,
    value_coefficients=credit.value_coefficients,
    columns=token_columns(batch.for_loss()),
  )


def _mean(values: Array, weights: Array) -> Array:
  inside = weights > 0
  return jnp.sum(jnp.where(inside, weights * values, 0)) / jnp.maximum(jnp.sum(weights), 1e-9)
