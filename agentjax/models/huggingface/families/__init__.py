"""Model families by ``model_type``: one module each, with its config and its tensor names."""

from __future__ import annotations

from agentjax.models.huggingface.families import (
  gemma4,
  llama,
  longcat_flash,
  mamba2,
  nemotron_h,
  qwen2,
  qwen3,
  qwen3_moe,
  youtu,
)
from agentjax.models.huggingface.mapping import Family

FAMILIES: dict[str, Family] = {
  family.model_type: family
  for family in (
    llama.FAMILY,
    llama.IQUESTCODER,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    mamba2.FAMILY,
    nemotron_h.FAMILY,
    youtu.FAMILY,
    longcat_flash.FAMILY,
    gemma4.TEXT_FAMILY,
    gemma4.FAMILY,
  )
}
