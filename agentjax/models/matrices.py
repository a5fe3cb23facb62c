"""Which arrays are matrices, and which of their axes are inputs and outputs, from their specs."""

from __future__ import annotations

import dataclasses
import math

from agentjax.models.config import ModelConfig
from agentjax.models.spec import ParamSpec

# One matrix for each place along these; they stand before the matrix's own axes.
_STACKED = ("layers", "experts")


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
  """How an array is a stack of linear maps; its axes are ``(*stack, *inputs, *outputs)``."""

  stack: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]


def matrix_axes(spec: ParamSpec) -> MatrixAxes | None:
  """The linear maps that an array holds, or None if it holds none.

  A matrix of a block goes from its first axis to all others, or from all others to a last axis
  "embed": attention's [embed, heads, head_dim] is ``embed x (heads head_dim)``, its way back
  [heads, head_dim, embed] is ``(heads head_dim) x embed``. Layers and experts stacked in one array
  are separate maps. Embeddings, output heads, norms, biases, convolution taps, decay rates and
  routers are not such maps.
  """
  stack = stack_axes(spec)
  own = tuple(range(stack, len(spec.shape)))
  special = spec.wide or not spec.decayed or not spec.trained or "vocab" in spec.axes
  if special or len(own) < 2:
    return None
  split = len(own) - 1 if spec.axes[-1] == "embed" else 1
  return MatrixAxes(tuple(range(stack)), own[:split], own[split:])


def matrix_spec(
  config: ModelConfig, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> ParamSpec:
  """A matrix of a block (see ``matrix_axes``), drawn with deviation ``init_scale / sqrt(inputs)``.

  One that ends in "embed" adds to the stream, and has the factor ``residual_scale`` too.
  """
  spec = ParamSpec(shape, axes, config.param_dtype)
  found = matrix_axes(spec)
  assert found is not None, f"{shape} with axes {axes} is no matrix"
  inputs = math.prod(shape[i] for i in found.inputs)
  scale = config.init_scale * config.residual_scale if axes[-1] == "embed" else config.init_scale
  return dataclasses.replace(spec, scale=scale * inputs**-0.5)


def stack_axes(spec: ParamSpec) -> int:
  """How many leading axes stack separate layers and experts."""
  stack = 0
  while stack < len(spec.axes) and spec.axes[stack] in _STACKED:
    stack += 1
  return stack
