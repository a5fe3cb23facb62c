"""Losses of a value head, per token."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.config import Config, NonNegativeFloat, PositiveFloat


@dataclasses.dataclass(unsafe_hash=True)
class ValueLossConfig(Config):
  """Attributes:
  kind: "squared" (the head's output is the value, ``squared_value_loss``) or "bernoulli" (it is
    the logit of the chance of success, ``bernoulli_value_loss``; rewards must lie in 0..1).
  coefficient: factor on the value loss in the total.
  clip: bound on the change of a value since the start of the update; None = off.
  """

  kind: Literal["squared", "bernoulli"] = "squared"
  coefficient: NonNegativeFloat = 0.5
  clip: PositiveFloat | None = None

  def validate(self, path: str = "value_loss") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.clip is None or self.kind == "squared", "clip", f"None with {path}.kind={self.kind!r}"
    )

  def value(self, output: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Expected reward, from the head's output."""
    return output if self.kind == "squared" else jax.nn.sigmoid(output)


def value_loss(
  outputs: Float[Array, "*shape"],
  returns: Float[Array, "*shape"],
  config: ValueLossConfig,
  *,
  old_outputs: Float[Array, "*shape"] | None = None,
) -> Float[Array, "*shape"]:
  """The loss that ``config`` names, of the head's outputs; ``old_outputs`` where it clips."""
  if config.kind == "bernoulli":
    return bernoulli_value_loss(outputs, returns)
  return squared_value_loss(outputs, returns, old_values=old_outputs, clip=config.clip)


def squared_value_loss(
  values: Float[Array, "*shape"],
  returns: Float[Array, "*shape"],
  *,
  old_values: Float[Array, "*shape"] | None = None,
  clip: float | None = None,
) -> Float[Array, "*shape"]:
  """``1/2 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)``; PPO, 1707.06347.

  Args:
    values: V, differentiable. returns: targets G, no gradient flows into them.
    old_values: V_old, needed with ``clip``.
    clip: None = plain squared error.
  """
  returns = jax.lax.stop_gradient(returns)
  error = jnp.square(values - returns)
  if clip is not None:
    if old_values is None:
      raise ValueError(f"clip={clip} needs old_values; pass them, or clip=None.")
    old_values = jax.lax.stop_gradient(old_values)
    near = jnp.clip(values, old_values - clip, old_values + clip)
    error = jnp.maximum(error, jnp.square(near - returns))
  return 0.5 * error


def bernoulli_value_loss(
  logits: Float[Array, "*shape"], outcomes: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """``-(R log s(z) + (1 - R) log(1 - s(z)))``, R in 0..1; sequence-level PPO 2604.08865."""
  return jax.nn.softplus(logits) - jax.lax.stop_gradient(outcomes) * logits
