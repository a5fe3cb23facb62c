"""Root-mean-square norms, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float

from agentjax.models.config import ModelConfig
from agentjax.models.spec import ParamSpec

Array = jax.Array


def norm_spec(size: int, config: ModelConfig) -> ParamSpec:
  """Weight of an RMSNorm over ``size`` channels, ones."""
  return ParamSpec((size,), (None,), config.param_dtype, "ones", decayed=False, wide=True)


def rms_norm(
  x: Float[Array, "... channels"], weight: Float[Array, " channels"] | None, eps: float
) -> Float[Array, "... channels"]:
  """``x / sqrt(mean x² + eps) * weight`` in float32, in the dtype of x; no weight is ones."""
  wide = x.astype(jnp.float32)
  wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
  if weight is not None:
    wide = wide * weight.astype(jnp.float32)
  return wide.astype(x.dtype)


def gated_rms_norm(
  x: Float[Array, "... channels"],
  gate: Float[Array, "... channels"],
  weight: Float[Array, " channels"],
  groups: int,
  eps: float,
) -> Float[Array, "... channels"]:
  """Gate first, then RMSNorm over each of ``groups`` runs of channels (Mamba-2 in Nemotron-H).

  ``u = x silu(gate)``; ``u / sqrt(mean_group u² + eps) * weight``; float32, in the dtype of gate.
  """
  gated = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
  parts = gated.reshape(*gated.shape[:-1], groups, -1)
  parts = parts * jax.lax.rsqrt(jnp.mean(jnp.square(parts), axis=-1, keepdims=True) + eps)
  return (parts.reshape(gated.shape) * weight.astype(jnp.float32)).astype(gate.dtype)
