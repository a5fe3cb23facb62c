"""The layer of LongCat-Flash: two attentions, two MLPs and one mixture beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax

from agentjax.models.config import ModelConfig
from agentjax.models.mla import LatentCache, Mla, init_latent_cache, mla_spec
from agentjax.models.mlp import Mlp, mlp, mlp_spec
from agentjax.models.moe import Moe, Routing, moe_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import Weight

Array = jax.Array


@flax.struct.dataclass
class Half:
  """Attention and MLP, each behind its norm."""

  attention_norm: Weight  # [embed]
  attention: Mla
  mlp_norm: Weight  # [embed]
  mlp: Mlp


@flax.struct.dataclass
class LongcatLayer:
  """Weights of one layer."""

  first: Half
  second: Half
  moe: Moe


def longcat_spec(config: ModelConfig) -> LongcatLayer:
  """Abstract parameters of one layer."""
  half = Half(
    attention_norm=norm_spec(config.d_model, config),
    attention=mla_spec(config),
    mlp_norm=norm_spec(config.d_model, config),
    mlp=mlp_spec(config, config.d_mlp),
  )
  return LongcatLayer(first=half, second=half, moe=moe_spec(config))


def init_longcat_cache(
  config: ModelConfig, slots: int, length: int
) -> tuple[LatentCache, LatentCache]:
  """One cache for each of the two attentions."""
  return init_latent_cache(config, slots, length), init_latent_cache(config, slots, length)


def longcat_layer(
  params: LongcatLayer,
  x: Array,
  config: ModelConfig,
  *,
  attend: Callable[[Mla, Array, int], tuple[Array, Any]],
  mix: Callable[[Moe, Array], tuple[Array, Routing]],
) -> tuple[Array, tuple[Any, Any], Routing]:
  """The shortcut-connected layer, the same in training and decoding.

  ``h = x + attention_0(norm x); z = norm h; h = h + mlp_0(z); h = h + attention_1(norm h);
  y = h + mlp_1(norm h) + moe(z)``: the mixture reads what the first MLP reads and is added at the
  end, so that sending tokens to experts and back can overlap with the second half.

  Args:
    x: [..., embed].
    attend: ``(weights, inputs, 0 or 1) -> (result, anything)``.
    mix: ``(weights, inputs) -> (result, routing)``.

  Returns:
    [..., embed]; what ``attend`` returned beside its two results; the routing.

  References: LongCat-Flash, 2509.01322.
  """

  def half(weights: Half, x: Array, index: int) -> tuple[Array, Array, Any]:
    out, kept = attend(weights.attention, rms_norm(x, weights.attention_norm, eps), index)
    x = x + out
    inputs = rms_norm(x, weights.mlp_norm, eps)
    return x + mlp(weights.mlp, inputs, config.mlp_activation), inputs, kept

  eps = config.norm_eps
  x, inputs, first = half(params.first, x, 0)
  mixed, routing = mix(params.moe, inputs)
  x, _, second = half(params.second, x, 1)
  return x + mixed, (first, second), routing
