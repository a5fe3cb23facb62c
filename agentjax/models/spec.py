"""One abstract spec per array: init, sharding and checkpoint targets derive from it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

Array = jax.Array
Init = Literal["normal", "zeros", "ones", "decay_rate", "step_bias", "identity"]
Weight = Any  # a field of a parameter container: an Array, or the ParamSpec it is made from


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Abstract description of an array.

  Attributes:
    shape: array shape.
    axes: a logical name per dimension (see ``agentjax.sharding``), None where it is never sharded.
    dtype: storage dtype.
    init: "normal" draws N(0, scale²); "zeros"; "ones"; "decay_rate" is log(1), log(2), … along the
      last axis (Mamba-2's A_log); "step_bias" is the inverse softplus of a step drawn log-uniform
      in [low, high], at least ``floor`` (Mamba-2's dt_bias).
      "identity" has ones where the last two indices agree.
    scale: standard deviation of "normal".
    low, high, floor: of "step_bias".
    trained: False for arrays that no gradient moves (the router's bias).
    decayed: whether weight decay may apply; False for norms, biases and decay rates.
    wide: used in float32 for any compute dtype: norms, routers, decay rates and steps.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: str = "float32"
  init: Init = "normal"
  scale: float = 1.0
  low: float = 1e-3
  high: float = 1e-1
  floor: float = 1e-4
  trained: bool = True
  decayed: bool = True
  wide: bool = False

  def __post_init__(self) -> None:
    if len(self.shape) != len(self.axes):
      raise ValueError(f"shape {self.shape} and axes {self.axes} must have one length.")

  def stacked(self, repeats: int) -> ParamSpec:
    """The same array for ``repeats`` layers, along a new leading axis "layers"."""
    return dataclasses.replace(self, shape=(repeats, *self.shape), axes=("layers", *self.axes))

  def __getitem__(self, layer: int) -> ParamSpec:
    """One layer of a stacked array, as indexing the array gives it."""
    del layer
    return dataclasses.replace(self, shape=self.shape[1:], axes=self.axes[1:])


def is_spec(value: Any) -> bool:
  """Leaf test for ``jax.tree`` functions on trees of specs."""
  return isinstance(value, ParamSpec)


def init_params(specs: Any, key: Array) -> Any:
  """Draws every array of ``specs``.

  The key of an array is folded from its path, so that adding one never changes another.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, spec: _draw(spec, jax.random.fold_in(key, _address(path))),
    specs,
    is_leaf=is_spec,
  )


def abstract(specs: Any) -> Any:
  """``jax.ShapeDtypeStruct`` per spec: restore targets and ahead-of-time compilation."""
  return jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), specs, is_leaf=is_spec
  )


def count(specs: Any) -> int:
  """Number of parameters."""
  return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def decay_mask(specs: Any) -> Any:
  """Tree of bool: arrays that weight decay applies to."""
  return jax.tree.map(lambda spec: spec.trained and spec.decayed, specs, is_leaf=is_spec)


def _address(path: tuple[Any, ...]) -> int:
  digest = hashlib.sha256(jax.tree_util.keystr(path).encode()).digest()
  return int.from_bytes(digest[:4], "big")


def _draw(spec: ParamSpec, key: Array) -> Array:
  dtype = jnp.dtype(spec.dtype)
  match spec.init:
    case "normal":
      return (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)
    case "zeros":
      return jnp.zeros(spec.shape, dtype)
    case "ones":
      return jnp.ones(spec.shape, dtype)
    case "identity":
      rows, columns = spec.shape[-2:]
      return jnp.broadcast_to(jnp.eye(rows, columns, dtype=dtype), spec.shape)
    case "decay_rate":
      rates = jnp.arange(1, spec.shape[-1] + 1, dtype=jnp.float32)
      return jnp.broadcast_to(jnp.log(rates), spec.shape).astype(dtype)
    case "step_bias":
      low, high = math.log(spec.low), math.log(spec.high)
      step = jnp.exp(jax.random.uniform(key, spec.shape, jnp.float32, low, high))
      step = jnp.maximum(step, spec.floor)
      # softplus(bias) = step, written so that small steps keep their digits.
      return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
