"""Llama 2 and 3, and models that are a Llama under another ``model_type``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Family


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  # Llama's bias is on the output projection too.
  transformer.require(values, "attention_bias", False)
  transformer.require(values, "mlp_bias", False)
  return transformer.dense_config(values, qk_norm=False, bias=False)


FAMILY = Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=transformer.to_hf,
  tensors=transformer.dense_tensors,
  ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
IQUESTCODER = dataclasses.replace(FAMILY, model_type="iquestcoder")
