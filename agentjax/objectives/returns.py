"""Rewards to go, GAE and baselines on index sets: gather, scan backwards, scatter.

One recursion serves tokens, turns and any other units. Tokens without weight are skipped: the
recursion carries its state across observations, so an early turn gets the reward of a later one. A
reward counts on weighted tokens only: put it on the token that earned it.

``values[b, t]`` is the value of the state in which token t was chosen, aligned with the token as
log-probs are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.objectives.segments import first_of_unit, last_of_unit, unit_sum


def reward_to_go(
  rewards: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  *,
  gamma: float,
  units: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time"]:
  """``G_k = r_k + gamma G_{k+1}`` over the steps of each sequence, on every token of step k.

  Args:
    rewards: reward of each token; a step's reward is the sum over its weighted tokens.
    weights: tokens with weight 0 are no steps and get 0.
    segment_ids: sequences; nothing crosses from one to the next.
    gamma: discount a step.
    units: steps (``segments.turn_units``...); None = every weighted token is one.

  References: chunk returns of IPA, 2512.24873; REINFORCE++, 2501.03262.
  """
  steps = _Steps.create(weights, segment_ids, units, at="last")
  return steps.scatter(steps.scan(steps.gather_sum(rewards), gamma))


def gae(
  rewards: Float[Array, "batch time"],
  values: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  *,
  gamma: float,
  lam: float | Float[Array, "batch time"],
  units: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time"]:
  """``delta_k = r_k + gamma V_{k+1} - V_k``; ``A_k = delta_k + gamma lam A_{k+1}``.

  Args:
    rewards, weights, segment_ids, gamma, units: as in ``reward_to_go``.
    values: V of the state before the token; a step's value is that of its first weighted
      token.
    lam: one number, or one a token (VAPO's depends on the length).

  Returns:
    Advantages [B, T], 0 on tokens without weight. Value targets are ``A + values`` with the value
    targets' own lambda (at a step's value token).

  References: Schulman et al., 1506.02438; turn-level: VL-DAC, SPA-RL.
  """
  steps = _Steps.create(weights, segment_ids, units, at="first")
  deltas = steps.gather_sum(rewards) + gamma * steps.next(values) - values
  return steps.scatter(steps.scan(deltas, gamma * lam))


def bilevel_gae(
  rewards: Float[Array, "batch time"],
  values: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  units: Int[Array, "batch time"],
  *,
  gamma: float,
  lam: float | Float[Array, "batch time"],
  unit_gamma: float,
) -> Float[Array, "batch time"]:
  """GAE over turn ends, then over the tokens of each turn, whose last reward is the turn's return.

  Turn ends are the last weighted tokens of ``units``, also of turns that earned 0.

  References: RAGEN, 2504.20073 and 2604.06268.
  """
  ends = last_of_unit(weights, units)
  across = gae(rewards, values, ends.astype(values.dtype), segment_ids, gamma=unit_gamma, lam=lam)
  inner_rewards = jnp.where(ends, across + values, rewards)
  return gae(inner_rewards, values, weights, units, gamma=gamma, lam=lam)


def length_adaptive_lambda(lengths: Float[Array, "*shape"], alpha: float) -> Float[Array, "*shape"]:
  """VAPO's ``lambda = 1 - 1 / (alpha length)``, at least 0; 2504.05118, alpha .05."""
  return jnp.maximum(0.0, 1.0 - 1.0 / (alpha * jnp.maximum(lengths, 1)))


def whiten(
  values: Float[Array, "batch time"],
  weights: Float[Array, "batch time"],
  *,
  ddof: int = 1,
  epsilon: float = 1e-8,
) -> Float[Array, "batch time"]:
  """``(x - mean) / sqrt(var + epsilon)`` over the weighted tokens of the batch; 0 elsewhere.

  Without spread, and with fewer than two tokens, everything is 0.
  """
  inside = weights > 0
  number = jnp.sum(inside)
  mean = jnp.sum(jnp.where(inside, values, 0)) / jnp.maximum(number, 1)
  centred = jnp.where(inside, values - mean, 0)
  variance = jnp.sum(jnp.square(centred)) / jnp.maximum(number - ddof, 1)
  high = jnp.max(jnp.where(inside, values, -jnp.inf))
  low = jnp.min(jnp.where(inside, values, jnp.inf))
  return jnp.where(high > low, centred * jax.lax.rsqrt(variance + epsilon), 0)


class _Steps(NamedTuple):
  """The steps of a recursion: one chosen token for each, and which token follows which."""

  chosen: Bool[Array, "batch time"]
  linked: Bool[Array, "batch time"]  # to the next token of the row
  weights: Float[Array, "batch time"]
  units: Int[Array, "batch time"]

  @classmethod
  def create(
    cls, weights: Array, segment_ids: Array, units: Array | None, *, at: Literal["first", "last"]
  ) -> _Steps:
    inside = (weights > 0) & (segment_ids > 0)
    if units is None:
      positions = jnp.arange(1, weights.shape[1] + 1)
      units = jnp.where(inside, positions, 0)
    chosen = (first_of_unit if at == "first" else last_of_unit)(weights, units) & inside
    end = jnp.zeros_like(inside[:, :1])
    linked = jnp.concatenate([segment_ids[:, 1:] == segment_ids[:, :-1], end], axis=1)
    return cls(chosen, linked, weights, units)

  def gather_sum(self, values: Array) -> Array:
    """Sum over the weighted tokens of each step, at its chosen token."""
    return unit_sum(jnp.where(self.weights > 0, values, 0), self.units)

  def scan(self, increments: Array, decay: float | Array) -> Array:
    """``x_k = increment_k + decay_k x_{k+1}`` along the chosen tokens, carried over the others."""
    factor = jnp.where(self.linked, jnp.where(self.chosen, decay, 1.0), 0.0)
    return _affine_scan(factor, jnp.where(self.chosen, increments, 0))

  def next(self, values: Array) -> Array:
    """Value at the next chosen token of the sequence, 0 after the last."""
    carried = _affine_scan(self.linked & ~self.chosen, jnp.where(self.chosen, values, 0))
    shifted = jnp.concatenate([carried[:, 1:], jnp.zeros_like(carried[:, :1])], axis=1)
    return jnp.where(self.linked, shifted, 0)

  def scatter(self, values: Array) -> Array:
    """From the chosen tokens to all weighted tokens of their steps."""
    spread = unit_sum(jnp.where(self.chosen, values, 0), self.units)
    return jnp.where(self.weights > 0, spread, 0)


def _affine_scan(factor: Array, increment: Array) -> Array:
  """``x_t = increment_t + factor_t x_{t+1}`` over time."""

  def step(state: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
    state = inputs[1] + inputs[0] * state
    return state, state

  factor = jnp.broadcast_to(factor, increment.shape).astype(increment.dtype)
  start = jnp.zeros_like(increment[:, 0])
  # One token after another: so padding cannot change the order of additions.
  return jax.lax.scan(step, start, (factor.T, increment.T), reverse=True)[1].T
