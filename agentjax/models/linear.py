"""Matrix products of activations with weights, and their precision."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from agentjax.models.narrow import Narrow
from agentjax.models.spec import Weight
from agentjax.sharding import ways

Array = jax.Array

LINEAR = "linear"  # what ``remat="dots"`` knows the results of ``linear`` by


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
  """Float32 operands are multiplied in float32 on every backend; narrower ones as they are."""
  wide = jnp.dtype(dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


@flax.struct.dataclass
class Adapted:
  """A frozen weight W with a low-rank change beside it (2106.09685).

  The products of this module apply it as ``x W + scale (x A) B``: no array of the shape of W is
  made, neither a sum of both nor a gradient. Stacks of layers and experts stand before the axes
  below, in all three alike.

  Several adapters of one W stand one behind the other along ``rank``. Each row of x then passes all
  of A, and ``rows`` is 1 where a column is of the row's own adapter and 0 elsewhere: on a matrix
  unit that costs what one adapter does, as long as their ranks together are narrow.
  """

  base: Weight  # [*inputs, *outputs]
  a: Weight  # [*inputs, rank]
  b: Weight  # [rank, *outputs]
  scale: float = flax.struct.field(pytree_node=False)
  rows: Weight | None = None  # [*lead, rank], lead being the first axes of x; None is one adapter

  @property
  def shape(self) -> tuple[int, ...]:
    """Of W."""
    return self.base.shape

  def astype(self, dtype: jnp.dtype) -> Adapted:
    """In another dtype."""
    base, a, b = (w.astype(dtype) for w in (self.base, self.a, self.b))
    rows = None if self.rows is None else self.rows.astype(dtype)
    return dataclasses.replace(self, base=base, a=a, b=b, rows=rows)

  def __getitem__(self, index: Any) -> Adapted:
    """Of some layers or experts of a stack."""
    return dataclasses.replace(self, base=self.base[index], a=self.a[index], b=self.b[index])

  def scaled(self, narrow: Float[Array, "*lead rank"]) -> Float[Array, "*lead rank"]:
    """What goes from A to B."""
    narrow = narrow * jnp.asarray(self.scale, narrow.dtype)
    if self.rows is None:
      return narrow
    lead, rank = self.rows.shape[:-1], self.rows.shape[-1]
    between = (1,) * (narrow.ndim - self.rows.ndim)
    return narrow * self.rows.astype(narrow.dtype).reshape(*lead, *between, rank)

  def __jax_array__(self) -> Array:
    raise TypeError(
      f"a weight {self.shape} with adapters is used as an array; allowed: linear(x, weight) of "
      "agentjax.models.linear in the block, or config.lora.targets without this weight."
    )


def linear(
  x: Float[Array, "*lead in"], weight: Weight, bias: Array | None = None
) -> Float[Array, "*lead out"]:
  """``x @ weight + bias`` in the dtype of x.

  ``weight`` [*in, *out] is an array, or ``Adapted``, or ``Narrow``.

  The first axes of the weight, as many as the last of x holds, are one, and so are the others.
  Where time is split over devices, rows and time stay axes of their own: one axis of both could not
  be split alike, and x would be gathered. Elsewhere they are one, which XLA:CPU runs faster.
  """
  if isinstance(weight, Adapted):
    narrow = weight.scaled(_trained(x, weight.a))
    out = _frozen(x, weight.base) + _trained(narrow, weight.b)
  else:
    out = _frozen(x, weight) if isinstance(weight, Narrow) else _trained(x, weight)
  out = checkpoint_name(out, LINEAR)
  return out if bias is None else out + bias.astype(x.dtype).reshape(-1)


def _flat(x: Array, weight: Array) -> Array:
  """[in, out] in the dtype of x."""
  size = x.shape[-1]
  if size not in itertools.accumulate(weight.shape, operator.mul):
    raise ValueError(
      f"x {x.shape} by a weight {weight.shape}, whose first axes do not hold {size}."
    )
  return weight.astype(x.dtype).reshape(size, -1)


def _trained(x: Array, weight: Array) -> Array:
  flat = _flat(x, weight)
  if ways("time") > 1:
    return _linear(x, flat)
  return matmul(x.reshape(-1, x.shape[-1]), flat).reshape(*x.shape[:-1], flat.shape[1])


def _frozen(x: Array, weight: Weight) -> Array:
  """The same without the rule that always makes a gradient of the weight, asked for or not."""
  if isinstance(weight, Narrow):
    # Scaled behind the product: XLA:TPU then widens the numbers in it, in few operations.
    out = _frozen(x, weight.numbers) * weight.scales.reshape(-1)
    return out.astype(x.dtype)
  flat = _flat(x, weight)
  if ways("time") > 1:
    return _contract(x, flat, (x.ndim - 1,), (0,))
  out = jnp.matmul(x.reshape(-1, x.shape[-1]), flat, precision=precision(x.dtype))
  return out.reshape(*x.shape[:-1], flat.shape[1])


def batched(x: Float[Array, "batch rows in"], weight: Weight) -> Float[Array, "batch rows out"]:
  """``x @ weight``, a matrix [in, out] for each of the batch; an array, or ``Adapted``."""
  if not isinstance(weight, Adapted):
    return matmul(x, weight.astype(x.dtype))
  base = jnp.matmul(x, weight.base.astype(x.dtype), precision=precision(x.dtype))
  return base + matmul(weight.scaled(matmul(x, weight.a)), weight.b)


def up_heads(
  x: Float[Array, "rows time heads in"], weight: Weight
) -> Float[Array, "rows time heads out"]:
  """Each head by its own part of ``weight`` [in, heads, out]."""
  return summed(x, weight, "rthi,iho->rtho", ("rthi,ik->rthk", "rthk,kho->rtho"))


def down_heads(
  x: Float[Array, "rows time heads out"], weight: Weight
) -> Float[Array, "rows time heads in"]:
  """Each head by the transpose of its own part of ``weight`` [in, heads, out]."""
  through = ("rtho,kho->rthk", "rthk,ik->rthi")
  return summed(x, weight, "rtho,iho->rthi", through, transposed=True)


def summed(
  x: Array, weight: Weight, whole: str, through: tuple[str, str], transposed: bool = False
) -> Array:
  """``einsum(whole, x, weight)`` in the dtype of x; ``weight`` is an array, or ``Adapted``.

  Args:
    x: activations.
    weight: see ``whole``.
    whole: equation of x and the weight.
    through: those of an adapter: of x and the first of its two matrices, and of that and the other.
    transposed: the first of them is B.
  """

  def product(equation: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(equation, x, weight.astype(x.dtype), precision=precision(x.dtype))

  if not isinstance(weight, Adapted):
    return product(whole, x, weight)
  first, second = (weight.b, weight.a) if transposed else (weight.a, weight.b)
  narrow = weight.scaled(product(through[0], x, first))
  return product(whole, x, weight.base) + product(through[1], narrow, second)


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
