"""Qwen3, dense: RMSNorm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Family


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  # Qwen3's bias is on the output projection too.
  transformer.require(values, "attention_bias", False)
  return transformer.dense_config({"head_dim": 128, **values}, qk_norm=True, bias=False)


FAMILY = Family(
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=transformer.to_hf,
  tensors=transformer.dense_tensors,
)
