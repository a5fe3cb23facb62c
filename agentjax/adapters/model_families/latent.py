"""Shared by families with latent attention: config.json keys and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.config import ConfigError
from agentjax.models.config import MlaConfig, ModelConfig
from agentjax.models.huggingface.mapping import Tensor

_WIDTHS = {
  "kv_lora": "kv_lora_rank",
  "nope_dim": "qk_nope_head_dim",
  "rope_dim": "qk_rope_head_dim",
  "value_dim": "v_head_dim",
}


def config_fields(
  values: Mapping[str, Any], *, theta: float = 10_000.0, **widths: Any
) -> dict[str, Any]:
  """Fields of latent attention; ``widths`` are further fields of ``MlaConfig``.

  Args:
    values: of config.json.
    theta: base of the rotary embedding where the file has none.
    **widths: see above.

  Raises:
    ConfigError: biases, or fewer key heads than query heads.
  """
  transformer.require(values, "attention_bias", False)
  transformer.require(values, "hidden_act", "silu")
  heads = transformer.get(values, "num_attention_heads")
  transformer.require(values, "num_key_value_heads", heads)
  # transformers takes the width of the rotary embedding from it.
  transformer.require(values, "head_dim", transformer.get(values, "qk_rope_head_dim"))
  return {
    "num_heads": heads,
    "mla": MlaConfig(
      query_lora=values.get("q_lora_rank"),
      **{ours: transformer.get(values, theirs) for ours, theirs in _WIDTHS.items()},
      **widths,
    ),
    **transformer.rope_fields(values, theta),
  }


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """The inverse, with the keys that all families have.

  Raises:
    ConfigError: a model without latent attention.
  """
  mla = config.mla
  if mla is None:
    raise ConfigError("config.mla=None; a model with latent attention has it")
  return {
    **transformer.to_hf(config),
    "num_key_value_heads": config.num_heads,
    "head_dim": mla.rope_dim,
    "q_lora_rank": mla.query_lora,
    **{theirs: getattr(mla, ours) for ours, theirs in _WIDTHS.items()},
  }


def attention(config: ModelConfig, at: str, ours: str) -> Iterator[Tensor]:
  """Projections and norms of one latent attention."""
  assert config.mla is not None, "validate() sees to it"
  joined = {
    f"{ours}query_nope": "(heads nope+) into -> into heads nope",
    f"{ours}query_rope": "(heads rope+) into -> into heads rope",
  }
  if config.mla.query_lora is None:
    yield Tensor(f"{at}q_proj.weight", joined)
  else:
    yield Tensor(f"{at}q_a_proj.weight", {f"{ours}query_down": "latent embed -> embed latent"})
    yield Tensor(f"{at}q_a_layernorm.weight", {f"{ours}query_norm": "latent"})
    yield Tensor(f"{at}q_b_proj.weight", joined)
  yield Tensor(
    f"{at}kv_a_proj_with_mqa.weight",
    {
      f"{ours}latent_down": "latent+ embed -> embed latent",
      f"{ours}key_rope": "rope+ embed -> embed rope",
    },
  )
  yield Tensor(f"{at}kv_a_layernorm.weight", {f"{ours}latent_norm": "latent"})
  yield Tensor(
    f"{at}kv_b_proj.weight",
    {
      f"{ours}key_up": "(heads nope+) latent -> latent heads nope",
      f"{ours}value_up": "(heads value+) latent -> latent heads value",
    },
  )
  yield Tensor(f"{at}o_proj.weight", {f"{ours}out": "embed (heads value) -> heads value embed"})
