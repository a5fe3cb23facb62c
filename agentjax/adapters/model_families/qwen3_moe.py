"""Qwen3, mixture of experts: softmax router, gated experts, no shared expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.config import ConfigError
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Absent, Family, OneOf, Tensor


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  transformer.require(values, "attention_bias", False)
  experts = values.get("num_experts") or transformer.get(values, "num_local_experts", 128)
  dense = transformer.get(values, "mlp_only_layers", [])
  every = transformer.get(values, "decoder_sparse_step", 1)
  if every < 1:
    raise ConfigError(f"config.json decoder_sparse_step={every!r}; supported: 1 or more.")
  kinds = (
    "-" if layer in dense or (layer + 1) % every else "E"
    for layer in range(transformer.get(values, "num_hidden_layers"))
  )
  return transformer.model_config(
    values,
    pattern="".join(f"*{kind}" for kind in kinds),
    norm_eps=transformer.get(values, "rms_norm_eps"),
    tie_embeddings=transformer.get(values, "tie_word_embeddings", False),
    d_mlp=transformer.get(values, "intermediate_size", 6144),
    mlp_activation="swiglu",
    qk_norm=True,
    num_experts=experts,
    experts_per_token=transformer.get(values, "num_experts_per_tok", 8),
    d_expert=transformer.get(values, "moe_intermediate_size"),
    d_shared_expert=0,
    router_scores="softmax",
    norm_topk=transformer.get(values, "norm_topk_prob", False),
    **transformer.attention_fields(values),
  )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """See ``Family``."""
  return {
    **transformer.to_hf(config),
    "num_experts": config.num_experts,
    "num_experts_per_tok": config.experts_per_token,
    "moe_intermediate_size": config.d_expert,
    "norm_topk_prob": config.norm_topk,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [i for i, kind in enumerate(config.pattern[1::2]) if kind == "-"],
  }


def tensors(config: ModelConfig) -> Iterator[Tensor | OneOf | Absent]:
  """See ``Family``."""
  yield from transformer.ends(config)
  for layer, kind in enumerate(config.pattern[1::2]):
    at = f"model.layers.{layer}."
    first, second = f"blocks.{2 * layer}.", f"blocks.{2 * layer + 1}."
    yield Tensor(f"{at}input_layernorm.weight", {f"{first}norm": "embed"})
    yield from transformer.attention(config, f"{at}self_attn.", f"{first}mixer.")
    yield Tensor(f"{at}post_attention_layernorm.weight", {f"{second}norm": "embed"})
    if kind == "-":
      yield from transformer.mlp(config, f"{at}mlp.", f"{second}mixer.")
    else:
      yield from _mixture(f"{at}mlp.", f"{second}mixer.")


def _mixture(at: str, ours: str) -> Iterator[Tensor | OneOf | Absent]:
  yield Tensor(f"{at}gate.weight", {f"{ours}router": "experts embed -> embed experts"})
  yield Absent(f"{ours}router_bias")
  up, down = "mlp embed -> experts embed mlp", "embed mlp -> experts mlp embed"
  joined = "experts mlp+ embed -> experts embed mlp"
  yield OneOf((
    (
      Tensor(f"{at}experts.{{experts}}.gate_proj.weight", {f"{ours}expert_gate": up}),
      Tensor(f"{at}experts.{{experts}}.up_proj.weight", {f"{ours}expert_up": up}),
      Tensor(f"{at}experts.{{experts}}.down_proj.weight", {f"{ours}expert_down": down}),
    ),
    (
      Tensor(
        f"{at}experts.gate_up_proj", {f"{ours}expert_gate": joined, f"{ours}expert_up": joined}
      ),
      Tensor(f"{at}experts.down_proj", {f"{ours}expert_down": f"experts {down}"}),
    ),
  ))  # fmt: skip


FAMILY = Family(
  model_type="qwen3_moe",
  architecture="Qwen3MoeForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  tensors=tensors,
)
