"""Low-rank adapters: ``x W + (alpha / rank) (x A) B``, W frozen, of any matrix of the blocks."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Int

from agentjax.config import Config, ConfigError, PositiveFloat, PositiveInt, check
from agentjax.models.linear import Adapted, precision
from agentjax.models.matrices import matrix_axes
from agentjax.models.narrow import is_narrow
from agentjax.models.spec import ParamSpec, Weight, init_params, is_spec

Array = jax.Array

# Paths of arrays that look like matrices and that no product of ``models.linear`` applies.
_NO_PRODUCTS = ("second_pass.",)


@dataclasses.dataclass(unsafe_hash=True)
class LoraConfig(Config):
  """Which arrays are adapted, and how (2106.09685).

  Attributes:
    rank: columns of A and rows of B; each layer and each expert of a stacked array has its own.
    alpha: the product is scaled by ``alpha / rank``.
    targets: patterns in the manner of a shell on the arrays' paths, as ``groups.0.1.mixer.query``:
      "*" are all matrices of the blocks, "*.mixer.query" the queries of all attention blocks.
      Embeddings, output head, norms, biases, gates and routers have no adapters.
  """

  rank: PositiveInt = 16
  alpha: PositiveFloat = 32.0
  targets: tuple[str, ...] = ("*",)

  @property
  def scale(self) -> float:
    """Factor on the product."""
    return self.alpha / self.rank

  def validate(self, path: str = "config.lora") -> None:
    super().validate(path)
    check(bool(self.targets), f"{path}.targets", self.targets, "at least one pattern")


@flax.struct.dataclass
class Adapter:
  """Float32 factors of one array, whose axes are ``(*stack, *inputs, *outputs)``."""

  a: Weight  # [*stack, *inputs, rank], starts as N(0, 1 / inputs)
  b: Weight  # [*stack, rank, *outputs], starts at zero


def lora_specs(specs: Any, config: LoraConfig) -> Any:
  """Abstract adapters: a tree like ``specs`` with an ``Adapter`` or None for every array.

  Args:
    specs: of the base parameters, from ``param_specs``.
    config: settings.

  Raises:
    ConfigError: a pattern that matches no matrix; the message lists the nearest paths.
  """
  pairs, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
  paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in pairs]
  matrices = [
    p
    for p, (_, s) in zip(paths, pairs, strict=True)
    if matrix_axes(s) is not None and not p.startswith(_NO_PRODUCTS)
  ]
  for pattern in config.targets:
    if not fnmatch.filter(matrices, pattern):
      near = difflib.get_close_matches(pattern.lstrip("*."), matrices, n=5, cutoff=0.3)
      raise ConfigError(
        f"config.lora.targets has {pattern!r}, which matches no matrix; the nearest are "
        f"{', '.join(near or matrices[:5])}."
      )

  def adapter(path: str, spec: ParamSpec) -> Adapter | None:
    if path not in matrices or not any(fnmatch.fnmatchcase(path, p) for p in config.targets):
      return None
    return adapter_spec(spec, config.rank)

  leaves = [adapter(path, spec) for path, (_, spec) in zip(paths, pairs, strict=True)]
  return jax.tree.unflatten(structure, leaves)


def init_lora(specs: Any, config: LoraConfig, key: Array) -> Any:
  """Draws adapters for parameters of ``specs``; their product is zero."""
  return init_params(lora_specs(specs, config), key)


def adapt(params: Any, adapters: Any, config: LoraConfig) -> Any:
  """Parameters that are applied with their adapters beside them; nothing is computed.

  Args:
    params: base parameters, or their specs or shardings.
    adapters: a tree like them, from ``init_lora`` or ``lora_specs``.
    config: of the adapters.
  """

  def place(weight: Any, adapter: Adapter | None) -> Any:
    return weight if adapter is None else Adapted(weight, adapter.a, adapter.b, config.scale)

  return jax.tree.map(place, params, adapters, is_leaf=is_spec)


def split_adapters(params: Any) -> tuple[Any, Any]:
  """Parameters without their adapters, and the adapters, in a tree like them with None elsewhere.

  The second is None where nothing is adapted. ``join_adapters`` puts both together again.
  """
  leaves, structure = jax.tree.flatten(params, is_leaf=_is_adapted)
  base = [leaf.base if _is_adapted(leaf) else leaf for leaf in leaves]
  factors = [leaf.replace(base=None) if _is_adapted(leaf) else None for leaf in leaves]
  some = any(factor is not None for factor in factors)
  return jax.tree.unflatten(structure, base), jax.tree.unflatten(
    structure, factors
  ) if some else None


def join_adapters(base: Any, factors: Any) -> Any:
  """What ``split_adapters`` has taken apart."""
  if factors is None:
    return base
  return jax.tree.map(
    lambda w, f: w if f is None else f.replace(base=w), base, factors, is_leaf=is_narrow
  )


@flax.struct.dataclass
class Shared:
  """Weights with adapters of several policies: each row of a batch is of one of these."""

  base: Any
  adapters: tuple[Any, ...]  # one a policy, from ``split_adapters``

  def for_rows(self, policies: Int[Array, " rows"]) -> Any:
    """Parameters for a batch whose first axis is ``rows``: each by the adapters of its policy."""

    def place(weight: Any, *factors: Any) -> Any:
      if factors[0] is None:
        return weight
      rank = factors[0].a.shape[-1]
      own = policies[:, None] == jnp.arange(len(factors) * rank) // rank
      return Adapted(
        weight,
        a=jnp.concatenate([f.a for f in factors], axis=-1),
        b=jnp.concatenate([f.b for f in factors], axis=len(_stack(factors[0], weight.ndim))),
        scale=factors[0].scale,
        rows=own,
      )

    return jax.tree.map(place, self.base, *self.adapters, is_leaf=is_narrow)


def _is_adapted(value: Any) -> bool:
  return isinstance(value, Adapted)


def merge_lora(params: Any, adapters: Any, config: LoraConfig) -> Any:
  """Parameters with the adapters added in, in the parameters' dtypes, as for export.

  Args:
    params: base parameters.
    adapters: from ``init_lora`` for these.
    config: of the adapters.
  """
  return merge_adapters(adapt(params, adapters, config))


def merge_adapters(params: Any) -> Any:
  """The same of parameters that have their adapters beside them already; others are as they are."""

  def add(weight: Any) -> Array:
    if not _is_adapted(weight):
      return weight
    base = weight.base
    change = weight.scale * _product(weight, base.ndim).reshape(base.shape)
    return (base.astype(jnp.float32) + change).astype(base.dtype)

  return jax.tree.map(add, params, is_leaf=_is_adapted)


def adapter_spec(spec: ParamSpec, rank: int) -> Adapter:
  """Abstract factors of one matrix."""
  axes = matrix_axes(spec)
  assert axes is not None

  def factor(*places: int | None, **fields: Any) -> ParamSpec:
    return ParamSpec(
      tuple(rank if i is None else spec.shape[i] for i in places),
      tuple(None if i is None else spec.axes[i] for i in places),
      **fields,
    )

  fan_in = math.prod(spec.shape[i] for i in axes.inputs)
  return Adapter(
    a=factor(*axes.stack, *axes.inputs, None, scale=fan_in**-0.5),
    b=factor(*axes.stack, None, *axes.outputs, init="zeros"),
  )


def _stack(adapter: Adapted, ndim: int) -> tuple[int, ...]:
  """The axes before a matrix of an array of ``ndim`` axes."""
  return adapter.a.shape[: adapter.a.ndim + adapter.b.ndim - 2 - ndim]


def _product(adapter: Adapted, ndim: int) -> Array:
  """``A B`` [*stack, inputs, outputs] for an array of ``ndim`` axes."""
  a, b = adapter.a, adapter.b
  stack, rank = _stack(adapter, ndim), a.shape[-1]
  return jnp.matmul(
    a.reshape(*stack, -1, rank), b.reshape(*stack, rank, -1), precision=precision(a.dtype)
  )
