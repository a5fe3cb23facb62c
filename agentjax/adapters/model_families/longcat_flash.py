"""LongCat-Flash (2509.01322): shortcut-connected layers with zero-computation experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from agentjax.adapters.model_families import latent, transformer
from agentjax.models.blocks import BlockKind, BlockReport
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Family, OneOf, Tensor
from agentjax.models.mla import (
  LatentCache,
  Mla,
  init_latent_cache,
  mla,
  mla_extend,
  mla_spec,
  mla_step,
)
from agentjax.models.mlp import Mlp, mlp, mlp_spec
from agentjax.models.moe import Moe, Routing, moe, moe_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import Weight

Array = jax.Array

_ALIASES = {
  "num_local_experts": "n_routed_experts",
  "num_experts_per_tok": "moe_topk",
  "intermediate_size": "ffn_hidden_size",
  "moe_intermediate_size": "expert_ffn_hidden_size",
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  values = transformer.renamed(values, _ALIASES)
  if values.get("num_hidden_layers") is not None:  # two attentions a layer
    transformer.require(values, "num_hidden_layers", 2 * transformer.get(values, "num_layers"))
  transformer.require(values, "router_bias", False)
  transformer.require(values, "norm_topk_prob", False)
  transformer.require(values, "zero_expert_type", "identity")
  transformer.require(values, "attention_method", "MLA")
  for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
    transformer.require(values, key, True)
  fields = latent.config_fields(values, theta=1e7, align_variance=True)
  transformer.get(values, "q_lora_rank")
  mla = fields["mla"]
  transformer.require(values, "qk_head_dim", mla.nope_dim + mla.rope_dim)
  return transformer.model_config(
    values,
    pattern="S" * transformer.get(values, "num_layers"),
    norm_eps=transformer.get(values, "rms_norm_eps", 1e-5),
    tie_embeddings=transformer.get(values, "tie_word_embeddings", False),
    d_mlp=transformer.get(values, "ffn_hidden_size"),
    mlp_activation="swiglu",
    num_experts=transformer.get(values, "n_routed_experts"),
    zero_experts=transformer.get(values, "zero_expert_num", 0),
    experts_per_token=transformer.get(values, "moe_topk"),
    d_expert=transformer.get(values, "expert_ffn_hidden_size"),
    d_shared_expert=0,
    router_scores="softmax",
    norm_topk=False,
    routed_scaling=float(transformer.get(values, "routed_scaling_factor", 6.0)),
    **fields,
  )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """See ``Family``."""
  keys = latent.to_hf(config)
  del keys["num_hidden_layers"], keys["intermediate_size"]
  return {
    **keys,
    "num_layers": len(config.pattern),
    "ffn_hidden_size": config.d_mlp,
    "n_routed_experts": config.num_experts,
    "zero_expert_num": config.zero_experts,
    "zero_expert_type": "identity",
    "moe_topk": config.experts_per_token,
    "expert_ffn_hidden_size": config.d_expert,
    "routed_scaling_factor": config.routed_scaling,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
  }


def tensors(config: ModelConfig) -> Iterator[Tensor | OneOf]:
  """See ``Family``."""
  yield from transformer.ends(config)
  for layer in range(len(config.pattern)):
    at, ours = f"model.layers.{layer}.", f"blocks.{layer}."
    for i, half in enumerate((f"{ours}first.", f"{ours}second.")):
      yield Tensor(f"{at}input_layernorm.{i}.weight", {f"{half}attention_norm": "embed"})
      yield from latent.attention(config, f"{at}self_attn.{i}.", f"{half}attention.")
      yield Tensor(f"{at}post_attention_layernorm.{i}.weight", {f"{half}mlp_norm": "embed"})
      yield from transformer.mlp(config, f"{at}mlps.{i}.", f"{half}mlp.")
    yield from _mixture(f"{at}mlp.", f"{ours}moe.")


def _mixture(at: str, ours: str) -> Iterator[Tensor | OneOf]:
  router = f"{at}router."
  yield Tensor(
    f"{router}classifier.weight", {f"{ours}router": "experts embed -> embed experts"}, dtype="F32"
  )
  yield Tensor(f"{router}e_score_correction_bias", {f"{ours}router_bias": "experts"}, dtype="F32")
  up, down = "mlp embed -> experts embed mlp", "embed mlp -> experts mlp embed"
  for field, pattern in (("gate", up), ("up", up), ("down", down)):
    yield Tensor(f"{at}experts.{{experts}}.{field}_proj.weight", {f"{ours}expert_{field}": pattern})


FAMILY = Family(
  model_type="longcat_flash",
  architecture="LongcatFlashForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  tensors=tensors,
  # transformers writes two projections for zero experts, which compute nothing. Layers that predict
  # further ahead are published beside the model, and nobody reads them.
  ignored=(
    r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj\.weight",
    r"model\.mtp\..*",
  ),
)


# The layer.


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


def _block() -> BlockKind:
  def forward(params, x, config, rows, given):
    def attend(weights, inputs, index):
      del index
      return mla(weights, inputs, config, segment_ids=rows.segment_ids, positions=rows.positions)

    def mix(weights, inputs):
      return moe(weights, inputs, config, segment_ids=rows.segment_ids, experts=given)

    x, tops, routing = longcat_layer(params, x, config, attend=attend, mix=mix)
    scores = None if tops[0] is None else jnp.stack(tops)
    return x, BlockReport(routing=routing, max_scores=scores)

  def decode(attend_slots):
    def run(params, x, entry, config, where, given):
      def attend(weights, inputs, index):
        return attend_slots(weights, inputs, entry[index], config, **where._asdict())

      def mix(weights, inputs):
        real = where.real.astype(jnp.int32)
        return moe(weights, inputs, config, segment_ids=real, experts=given)

      x, entry, routing = longcat_layer(params, x, config, attend=attend, mix=mix)
      return x, entry, routing.experts

    return run

  return BlockKind(
    spec=longcat_spec,
    forward=forward,
    init_cache=init_longcat_cache,
    extend=decode(mla_extend),
    step=decode(mla_step),
    routes=True,
  )


BLOCK = _block()
