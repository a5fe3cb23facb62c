"""Weights for decoding in 8 bits a number."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp

from agentjax.models.matrices import matrix_axes
from agentjax.models.spec import ParamSpec, Weight
from pallas_kernels.paged_attention import quantize

Array = jax.Array
WeightDtype = Literal["int8", "fp8"]
NARROW: dict[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@flax.struct.dataclass
class Narrow:
  """A matrix W in 8 bits a number: ``numbers * scales``, a float32 scale for each output.

  ``linear`` multiplies by the numbers and scales what comes out. Other products make it wide where
  it is used.
  """

  numbers: Weight  # int8 or float8_e4m3fn, of the shape of W
  scales: Weight  # float32; 1 along the inputs of W
  dtype: str = flax.struct.field(pytree_node=False)  # what it is made wide to

  @property
  def shape(self) -> tuple[int, ...]:
    """Of W."""
    return self.numbers.shape

  @property
  def ndim(self) -> int:
    """Axes of W."""
    return len(self.shape)

  def astype(self, dtype: Any) -> Array:
    """W, rounded once."""
    return (self.numbers.astype(jnp.float32) * self.scales).astype(dtype)

  def __getitem__(self, index: Any) -> Narrow:
    """Of some layers or experts of a stack."""
    return dataclasses.replace(self, numbers=self.numbers[index], scales=self.scales[index])

  def __jax_array__(self) -> Array:
    return self.astype(self.dtype)


def is_narrow(value: Any) -> bool:
  """Leaf test for ``jax.tree`` functions."""
  return isinstance(value, Narrow)


def narrow_weight(spec: ParamSpec, weight: Array, name: WeightDtype, wide: str) -> Any:
  """A matrix of the blocks as ``Narrow``; None for any other array.

  Args:
    spec: of the array.
    weight: float, of the shape of the spec, or filled up with zeros.
    name: of the narrow format.
    wide: what it is made wide to.
  """
  axes = matrix_axes(spec)
  if axes is None:
    return None
  return Narrow(*quantize(weight, NARROW[name], axes.inputs), wide)


def narrow_spec(spec: ParamSpec, name: WeightDtype, wide: str) -> Any:
  """What ``narrow_weight`` gives, as ``ParamSpec``s; None for an array that stays as it is."""
  axes = matrix_axes(spec)
  if axes is None:
    return None
  kept = [i not in axes.inputs for i in range(len(spec.shape))]
  return Narrow(
    dataclasses.replace(spec, dtype=jnp.dtype(NARROW[name]).name),
    dataclasses.replace(
      spec,
      shape=tuple(n if keep else 1 for n, keep in zip(spec.shape, kept, strict=True)),
      axes=tuple(axis if keep else None for axis, keep in zip(spec.axes, kept, strict=True)),
      dtype="float32",
    ),
    wide,
  )
