"""Feed-forward block: squared ReLU, or gated by SiLU or GELU."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float

from agentjax.models.config import Activation, ModelConfig
from agentjax.models.linear import linear
from agentjax.models.matrices import matrix_spec
from agentjax.models.spec import Weight

Array = jax.Array


@flax.struct.dataclass
class Mlp:
  """Weights of one feed-forward block; ``gate`` is None for squared ReLU."""

  up: Weight  # [embed, mlp]
  gate: Weight | None  # [embed, mlp]
  down: Weight  # [mlp, embed]


def mlp_spec(config: ModelConfig, width: int) -> Mlp:
  """Abstract parameters of a block of hidden width ``width``."""
  into = matrix_spec(config, (config.d_model, width), ("embed", "mlp"))
  return Mlp(
    up=into,
    gate=None if config.mlp_activation == "relu2" else into,
    down=matrix_spec(config, (width, config.d_model), ("mlp", "embed")),
  )


def mlp(
  params: Mlp, x: Float[Array, "... embed"], activation: Activation
) -> Float[Array, "... embed"]:
  """``down activate(up x, gate x)``."""
  gate = None if params.gate is None else linear(x, params.gate)
  return linear(activate(linear(x, params.up), gate, activation), params.down)


def activate(hidden: Array, gate: Array | None, activation: Activation) -> Array:
  """``relu(hidden)²`` without a gate; ``silu(gate) * hidden``, or with GELU (tanh) for "geglu"."""
  if gate is None:
    return jnp.square(jax.nn.relu(hidden))
  if activation == "geglu":
    return jax.nn.gelu(gate, approximate=True) * hidden
  return jax.nn.silu(gate) * hidden
