"""The activation that every implementation fuses with the convolution, and its slope."""

from __future__ import annotations

from typing import Literal

import jax

Array = jax.Array

Activation = Literal["silu"]


def activate(z: Array, activation: Activation | None) -> Array:
  """``z sigmoid(z)`` for "silu", z for None."""
  return z if activation is None else z * jax.nn.sigmoid(z)


def slope(z: Array, activation: Activation | None) -> Array | float:
  """Derivative of ``activate`` by z."""
  if activation is None:
    return 1.0
  gate = jax.nn.sigmoid(z)
  return gate * (1.0 + z * (1.0 - gate))
