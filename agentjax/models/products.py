"""Matrix products of activations with weights, and their precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float

Array = jax.Array


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
  """Float32 operands are multiplied in float32 on every backend; narrower ones as they are."""
  wide = jnp.dtype(dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def linear(x: Float[Array, "*lead in"], weight: Array) -> Float[Array, "*lead out"]:
  """``x @ weight`` in the dtype of x, the axes of ``weight`` [in, *out] after the first flattened.

  The gradient of the weight is written as ``xᵀ g``: the product that automatic differentiation makes,
  ``(gᵀ x)ᵀ``, costs XLA:CPU twice the time. Reverse mode only.
  """
  flat = weight.astype(x.dtype).reshape(weight.shape[0], -1)
  return _matmul(x.reshape(-1, x.shape[-1]), flat).reshape(*x.shape[:-1], flat.shape[1])


@jax.custom_vjp
def _matmul(x: Array, weight: Array) -> Array:
  return jnp.matmul(x, weight, precision=precision(x.dtype))


def _matmul_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
  return _matmul(x, weight), (x, weight)


def _matmul_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
  x, weight = kept
  exact = precision(x.dtype)
  return (
      jnp.matmul(gradient, weight.T, precision=exact),
      jnp.matmul(x.T, gradient, precision=exact),
  )


_matmul.defvjp(_matmul_forward, _matmul_backward)
