"""Matrix products of activations with weights, and their precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from agentjax.sharding import ways

Array = jax.Array

LINEAR = "linear"  # what ``remat="dots"`` knows the results of ``linear`` by


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
  """Float32 operands are multiplied in float32 on every backend; narrower ones as they are."""
  wide = jnp.dtype(dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def linear(
  x: Float[Array, "*lead in"], weight: Array, bias: Array | None = None
) -> Float[Array, "*lead out"]:
  """``x @ weight + bias`` in the dtype of x; all axes of ``weight`` [in, *out] but one as one.

  Where time is split over devices, rows and time stay axes of their own: one axis of both could not
  be split alike, and x would be gathered. Elsewhere they are one, which XLA:CPU runs faster.
  """
  flat = weight.astype(x.dtype).reshape(weight.shape[0], -1)
  if ways("time") > 1:
    out = _linear(x, flat)
  else:
    out = matmul(x.reshape(-1, x.shape[-1]), flat).reshape(*x.shape[:-1], flat.shape[1])
  out = checkpoint_name(out, LINEAR)
  return out if bias is None else out + bias.astype(x.dtype).reshape(-1)


def linear_gradients(
  x: Float[Array, "*lead in"], weight: Float[Array, "in out"], gradient: Float[Array, "*lead out"]
) -> tuple[Float[Array, "*lead in"], Float[Array, "in out"]]:
  """Gradients of x and of the weight from that of ``x @ weight``, all of one dtype."""
  if ways("time") > 1:
    lead = tuple(range(x.ndim - 1))
    to_x = _contract(gradient, weight, (x.ndim - 1,), (1,))
    return to_x, _contract(x, gradient, lead, lead)
  flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
  to_x, to_weight = _matmul_backward((flat[0], weight), flat[1])
  return to_x.reshape(x.shape), to_weight


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


@jax.custom_vjp
def _linear(x: Array, weight: Array) -> Array:
  """x [*lead, in] by weight [in, out]; the gradient of the weight as in ``matmul``."""
  return _contract(x, weight, (x.ndim - 1,), (0,))


def _linear_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
  return _linear(x, weight), (x, weight)


def _linear_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
  return linear_gradients(*kept, gradient)


_linear.defvjp(_linear_forward, _linear_backward)


def _contract(
  left: Array, right: Array, of_left: tuple[int, ...], of_right: tuple[int, ...]
) -> Array:
  return jax.lax.dot_general(
    left, right, ((of_left, of_right), ((), ())), precision=precision(left.dtype)
  )
