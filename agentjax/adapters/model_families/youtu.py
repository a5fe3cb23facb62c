"""Youtu-LLM: a dense model with latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.adapters.model_families import latent, transformer
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Family, Tensor


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  # Null is no, and a missing key is yes.
  interleaved = bool(values.get("rope_interleave", True))
  return transformer.model_config(
    values,
    pattern="A-" * transformer.get(values, "num_hidden_layers"),
    norm_eps=transformer.get(values, "rms_norm_eps"),
    tie_embeddings=transformer.get(values, "tie_word_embeddings", True),
    d_mlp=transformer.get(values, "intermediate_size"),
    mlp_activation="swiglu",
    **latent.config_fields(values, interleaved=interleaved),
  )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """See ``Family``."""
  keys = latent.to_hf(config)
  return {**keys, "rope_interleave": config.mla is None or config.mla.interleaved}


def tensors(config: ModelConfig) -> Iterator[Tensor]:
  """See ``Family``."""
  yield from transformer.ends(config)
  for layer in range(len(config.pattern) // 2):
    at = f"model.layers.{layer}."
    first, second = f"blocks.{2 * layer}.", f"blocks.{2 * layer + 1}."
    yield Tensor(f"{at}input_layernorm.weight", {f"{first}norm": "embed"})
    yield from latent.attention(config, f"{at}self_attn.", f"{first}mixer.")
    yield Tensor(f"{at}post_attention_layernorm.weight", {f"{second}norm": "embed"})
    yield from transformer.mlp(config, f"{at}mlp.", f"{second}mixer.")


FAMILY = Family(
  model_type="youtu",
  architecture="YoutuForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  tensors=tensors,
)
