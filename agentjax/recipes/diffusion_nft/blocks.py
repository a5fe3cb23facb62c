"""Pre-norm transformer blocks over patches, for the generator and for its critics.

Legend: B batch, T tokens, D width, H heads, K head width, L layers.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from agentjax.models.norm import rms_norm
from agentjax.models.spec import ParamSpec, Weight

Array = jax.Array

PATCH = 8  # pixels; a cell of a drawing
PATCHES = 16
PATCH_VALUES = PATCH * PATCH * 3
_EPS = 1e-6


@flax.struct.dataclass
class Blocks:
  """``L`` blocks, stacked.

  Attributes:
    qkv: [L, D, 3, H, K]. out: [L, H, K, D]. up: [L, D, 4 D]. down: [L, 4 D, D].
    modulation: [L, D, 6 D] from a condition to shift, scale and gate of both halves, zeros at the
      start (adaLN-zero, Peebles & Xie, 2212.09748); None in blocks without a condition.
  """

  qkv: Weight
  out: Weight
  up: Weight
  down: Weight
  modulation: Weight


def matrix(*shape: int, fan_in: int, stacked: bool = False) -> ParamSpec:
  """A matrix drawn with variance 1 / fan_in; ``stacked`` if its first axis counts layers."""
  axes = ("layers" if stacked else None, *(None,) * (len(shape) - 1))
  return ParamSpec(shape, axes, scale=fan_in**-0.5)


def blocks_spec(layers: int, width: int, heads: int, *, conditioned: bool) -> Blocks:
  """Specs of the blocks; the output matrices are scaled by 1 / sqrt(2 layers)."""
  head, depth = width // heads, 2 * layers
  return Blocks(
    qkv=matrix(layers, width, 3, heads, head, fan_in=width, stacked=True),
    out=matrix(layers, heads, head, width, fan_in=width * depth, stacked=True),
    up=matrix(layers, width, 4 * width, fan_in=width, stacked=True),
    down=matrix(layers, 4 * width, width, fan_in=4 * width * depth, stacked=True),
    modulation=ParamSpec((layers, width, 6 * width), ("layers", None, None), init="zeros")
    if conditioned
    else None,
  )


def run_blocks(
  params: Blocks,
  x: Float[Array, "B T D"],
  *,
  visible: Bool[Array, "T T"] | None = None,
  condition: Float[Array, "B D"] | None = None,
) -> Float[Array, "B T D"]:
  """All blocks in turn, and a norm.

  Args:
    params: of the blocks.
    x: tokens.
    visible: [query, key]; None lets every token see all.
    condition: for blocks with ``modulation``.
  """

  def step(x: Array, layer: Blocks) -> tuple[Array, None]:
    parts: list[Any] = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    if condition is not None:
      moved = jax.nn.silu(condition) @ layer.modulation
      parts = [part[:, None] for part in jnp.split(moved, 6, axis=-1)]
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    normed = rms_norm(x, None, _EPS) * (1 + scale) + shift
    query, key, value = jnp.einsum("btd,dshk->sbthk", normed, layer.qkv)
    mixed = jax.nn.dot_product_attention(
      query, key, value, mask=None if visible is None else visible[None, None]
    )
    x = x + gate * jnp.einsum("bthk,hkd->btd", mixed, layer.out)
    normed = rms_norm(x, None, _EPS) * (1 + mlp_scale) + mlp_shift
    return x + mlp_gate * (jax.nn.gelu(normed @ layer.up) @ layer.down), None

  x, _ = jax.lax.scan(step, x, params)
  return rms_norm(x, None, _EPS)


def patches(images: Float[Array, "B 32 32 3"]) -> Float[Array, "B 16 192"]:
  """The images in 16 patches."""
  parts = images.reshape(-1, 4, PATCH, 4, PATCH, 3).swapaxes(2, 3)
  return parts.reshape(-1, PATCHES, PATCH_VALUES)


def unpatch(tokens: Float[Array, "B 16 192"]) -> Float[Array, "B 32 32 3"]:
  """The inverse of ``patches``."""
  parts = tokens.reshape(-1, 4, 4, PATCH, PATCH, 3).swapaxes(2, 3)
  return parts.reshape(-1, 4 * PATCH, 4 * PATCH, 3)
