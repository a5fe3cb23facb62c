r"""Learning from preferences and outcomes: DPO, the implicit process reward model, AgentPRM.

``dpo_loss`` and ``implicit_prm_loss`` are functions of ``s_i = sum_t (log pi - log pi_ref)``, one
number a sequence. So their gradient is a policy gradient: with ``A_i = -dL / ds_i`` at the present
parameters, ``grad L = -sum_i A_i sum_t grad log pi_t``. ``preference_advantages`` gives that A. So
DPO uses the same code as every other objective, with packed rows, micro-batches and shards: chosen
and rejected may be anywhere in the batch. The gradient is exact for one optimiser step per batch
with the trainer's ``old_log_probs``; a run must have these settings.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import Config, PositiveFloat, Range
from agentjax.objectives.aggregation import divide
from agentjax.objectives.value_loss import bernoulli_value_loss
from agentjax.schedules import Scheduled


@dataclasses.dataclass(unsafe_hash=True)
class PreferenceConfig(Config):
  """A loss on the rewards of sequences that replaces the advantage.

  Attributes:
    form: "dpo": of two sequences of a group the one with the higher reward becomes likelier, and so
      for each such pair of larger groups. "outcome": the log-ratio of a sequence predicts its
      reward, which lies in 0..1 (implicit process reward model).
    beta: weight of the log-ratio to the reference; .1 in DPO.
    label_smoothing: share of the pairs that are taken to be labelled wrongly, for "dpo"; 0 is off.
  """

  form: Literal["dpo", "outcome"] = "dpo"
  beta: Scheduled[PositiveFloat] = 0.1
  label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.0

  def validate(self, path: str = "preference") -> None:
    super().validate(path)
    require, plain = self.requirements(path), self.label_smoothing == 0
    require(self.form == "dpo" or plain, "label_smoothing", "0 with form='outcome'")


def dpo_loss(
  chosen: Float[Array, "*pairs"],
  rejected: Float[Array, "*pairs"],
  *,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
) -> Float[Array, "*pairs"]:
  r"""``-(1 - e) log s(beta (s_w - s_l)) - e log s(-beta (s_w - s_l))``, one a pair.

  Args:
    chosen, rejected: ``sum_t (log pi - log pi_ref)`` of each answer, nats.
    beta: DPO's.
    label_smoothing: e.

  References:
    Rafailov et al., 2305.18290; the smoothed form is the conservative DPO of Mitchell, 2023.
  """
  margin = beta * (chosen - rejected)
  right, wrong = jax.nn.softplus(-margin), jax.nn.softplus(margin)
  return (1 - label_smoothing) * right + label_smoothing * wrong


def implicit_prm_loss(
  log_ratios: Float[Array, "*sequences"], outcomes: Float[Array, "*sequences"], *, beta: float
) -> Float[Array, "*sequences"]:
  r"""``-(o log s(beta s) + (1 - o) log(1 - s(beta s)))`` with ``s = sum_t (log pi - log pi_ref)``.

  It is trained only on outcomes o in 0..1; afterwards ``beta (log pi - log pi_ref)`` of a token is
  its process reward (``recipes.prime``).

  References:
    Yuan et al., 2412.01981 (implicit PRM); Cui et al., 2502.01456 (PRIME).
  """
  return bernoulli_value_loss(beta * log_ratios, outcomes)


def preference_advantages(
  log_ratios: Float[Array, "sequences"],
  rewards: Float[Array, "sequences"],
  valid: Bool[Array, "sequences"],
  groups: Int[Array, "sequences"],
  config: PreferenceConfig,
) -> tuple[Float[Array, "sequences"], dict[str, Float[Array, ""]]]:
  """``A_i = -S dL / ds_i`` of every sequence, S the number of valid ones; and metrics.

  With the aggregation "sequence_mean_token_sum", which divides by S, the update is the gradient of
  L. For "dpo" L is the mean over groups of the mean over pairs with different rewards; groups
  without such a pair do not count. For "outcome" it is the mean over valid sequences.

  Args:
    log_ratios: ``s_i = sum_t w_t (log pi - log pi_ref)`` at the present parameters.
    rewards: say which is better (for "outcome": the value that is predicted, 0..1); read only where
      valid.
    valid: others are in no pair.
    groups: the pairs are those within a group.
    config: which loss.

  Returns:
    A [N], 0 where nothing is learned, and ``preference/loss``, ``preference/accuracy`` (pairs in
    the right order, or outcomes on the right side of 1/2), ``preference/margin`` (mean of ``beta
    (s_w - s_l)``; for "outcome" of beta s).
  """
  count = jnp.sum(valid).astype(log_ratios.dtype)
  rewards = jnp.where(valid, rewards, 0)
  log_ratios = jnp.where(valid, log_ratios, 0)
  if config.form == "outcome":
    shares = divide(valid.astype(log_ratios.dtype), count)
    right = (log_ratios > 0) == (rewards > 0.5)

    def loss(sums: Array) -> Array:
      return jnp.sum(shares * implicit_prm_loss(sums, rewards, beta=config.beta))

    margin = config.beta * log_ratios
  else:
    together = (groups[:, None] == groups) & valid[:, None] & valid
    pairs = (together & (rewards[:, None] > rewards)).astype(log_ratios.dtype)
    per_group = jax.ops.segment_sum(pairs.sum(1), jnp.where(valid, groups, 0), groups.shape[0])
    shares = divide(pairs, per_group[jnp.where(valid, groups, 0)][:, None])
    shares = divide(shares, jnp.sum(per_group > 0).astype(shares.dtype))
    difference = log_ratios[:, None] - log_ratios
    right = difference > 0

    def loss(sums: Array) -> Array:
      terms = dpo_loss(
        sums[:, None], sums, beta=config.beta, label_smoothing=config.label_smoothing
      )
      return jnp.sum(shares * terms)

    margin = config.beta * difference
  value, slope = jax.value_and_grad(loss)(log_ratios)
  return -count * slope, {
    "preference/loss": value,
    "preference/accuracy": jnp.sum(shares * right),
    "preference/margin": jnp.sum(shares * margin),
  }
