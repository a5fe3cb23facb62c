"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Family


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  return transformer.dense_config(values, qk_norm=False, bias=True)


FAMILY = Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=transformer.to_hf,
  tensors=transformer.dense_tensors,
)
