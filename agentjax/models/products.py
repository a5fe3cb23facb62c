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


def linear(
  x: Float[Array, "*lead in"], weight: Array, bias: Array | None = None
) -> Float[Array, "*lead out"]:
  """``x @ weight + bias`` in the dtype of x; all axes of ``weight`` [in, *out] but one as one."""
  flat = weight.astype(x.dtype).reshape(weight.shape[0], -1)
  out = matmul(x.reshape(-1, x.shape[-1]), flat).reshape(*x.shape[:-1], flat.shape[1])
  return out if bias is None else out + bias.astype(x.dtype).reshape(-1)


@jax.custom_vjp
def matmul(
  x: Float[Array, "*batch rows in"], weight: Float[Array, "*batch in out"]
) -> Float[Array, "*batch rows out"]:
  """``x @ weight`` with one set of leading axes and one dtype.

  The gradient of the weight is written as ``xᵀ g``: what automatic differentiation makes of it,
  ``(gᵀ x)ᵀ``, takes XLA:CPU twice the time. Reverse mode only.
  """
  return jnp.matmul(x, weight, precision=precision(x.dtype))


def _matmul_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
  return matmul(x, weight), (x, weight)


def _matmul_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
  x, weight = kept
  return (
    matmul(gradient, jnp.swapaxes(weight, -1, -2)),
    matmul(jnp.swapaxes(x, -1, -2), gradient),
  )


matmul.defvjp(_matmul_forward, _matmul_backward)
