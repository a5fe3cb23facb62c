"""Shared by Llama and its descendants: tensors of attention and MLP blocks, config.json keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from agentjax.config import ConfigError
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Tensor


def require(values: Mapping[str, Any], key: str, *supported: Any) -> None:
  """Checks a key of config.json; one that is missing or null means the first supported value.

  Raises:
    ConfigError: another value, naming the supported ones.
  """
  value = values.get(key)
  if value is not None and value not in supported:
    raise ConfigError(
      f"config.json {key}={value!r} is not supported; supported: "
      f"{', '.join(repr(s) for s in supported)}."
    )


def get(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
  """A key of config.json; null counts as missing.

  Raises:
    ConfigError: it is missing and has no default.
  """
  value = values.get(key)
  value = default if value is None else value
  if value is None:
    raise ConfigError(f"config.json has no {key!r}, which its model_type needs.")
  return value


def renamed(values: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
  """Other names for keys; transformers takes one that is there before the key itself."""
  other = {
    aliases[key]: value for key, value in values.items() if value is not None and key in aliases
  }
  return {**values, **other}


def model_config(values: Mapping[str, Any], **fields: Any) -> ModelConfig:
  """ModelConfig of ``fields`` and of the keys that every family has; not yet validated."""
  if values.get("quantization_config") is not None:
    raise ConfigError(
      "config.json quantization_config is not supported; supported: float32, float16 and bfloat16 "
      "tensors. Convert the checkpoint to one of these first."
    )
  stored = values.get("dtype") or values.get("torch_dtype")
  dtype: Literal["float32", "bfloat16"] = "bfloat16" if stored == "bfloat16" else "float32"
  return ModelConfig(
    vocab_size=get(values, "vocab_size"),
    d_model=get(values, "hidden_size"),
    param_dtype=dtype,
    compute_dtype=dtype,
    **fields,
  )


def attention_fields(values: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of attention with rotary embedding.

  Raises:
    ConfigError: another attention than full, causal and grouped-query.
  """
  require(values, "use_sliding_window", False)
  require(values, "hidden_act", "silu")
  types, layers = values.get("layer_types"), get(values, "num_hidden_layers")
  if types is not None and list(types) != ["full_attention"] * layers:
    raise ConfigError(
      f"config.json layer_types={types!r} is not supported; supported: {layers} times "
      "'full_attention'."
    )
  heads = get(values, "num_attention_heads")
  # Not evaluated where head_dim is there: the width need not be a multiple of the heads.
  width = values.get("head_dim") or get(values, "hidden_size") // max(heads, 1)
  return {
    "num_heads": heads,
    "num_kv_heads": get(values, "num_key_value_heads", heads),
    "head_dim": width,
    **rope_fields(values),
  }


def rope_fields(values: Mapping[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
  """Rotary embedding as transformers reads it: of two mappings ``rope_scaling`` is the one.

  Args:
    values: of config.json.
    theta: where neither the mapping nor the file has a ``rope_theta``.

  Raises:
    ConfigError: a kind that is neither plain nor Llama 3's, or one without a key that it needs.
  """
  where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
  rope = values.get(where) or {}
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind not in ("default", "llama3"):
    raise ConfigError(
      f"config.json rope_type={kind!r} is not supported; supported: 'default', 'llama3'."
    )
  if rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
    raise ConfigError("config.json partial_rotary_factor is not supported; supported: 1.0.")
  fields = {"rope_theta": float(get(rope, "rope_theta", get(values, "rope_theta", theta)))}
  if kind == "llama3":
    # The key outside goes before the one in the mapping.
    lengths = (values.get(_LENGTH), rope.get(_LENGTH), values.get("max_position_embeddings"))
    rope = {**rope, _LENGTH: next((length for length in lengths if length is not None), None)}
    missing = [key for key in _ROPE_SCALING.values() if rope.get(key) is None]
    if missing:
      raise ConfigError(
        f"config.json {where} has no {', '.join(missing)}, which rope_type='llama3' needs."
      )
    fields |= {ours: rope[theirs] for ours, theirs in _ROPE_SCALING.items()}
  return fields


_LENGTH = "original_max_position_embeddings"


_ROPE_SCALING = {
  "rope_scaling_factor": "factor",
  "rope_low_freq_factor": "low_freq_factor",
  "rope_high_freq_factor": "high_freq_factor",
  "rope_original_length": _LENGTH,
}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
  """``rope_theta`` and ``rope_scaling``, which every release of transformers reads."""
  if config.rope_scaling_factor is None:
    return {"rope_theta": config.rope_theta, "rope_scaling": None}
  scaling = {theirs: getattr(config, ours) for ours, theirs in _ROPE_SCALING.items()}
  return {"rope_theta": config.rope_theta, "rope_scaling": {"rope_type": "llama3", **scaling}}


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Keys that all descendants of Llama share."""
  return {
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "num_hidden_layers": len(config.pattern) // 2,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "intermediate_size": config.d_mlp,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    **rope_to_hf(config),
  }


def ends(config: ModelConfig) -> Iterator[Tensor]:
  """Embedding, last norm and output projection."""
  yield Tensor("model.embed_tokens.weight", {"embedding": "vocab embed"})
  yield Tensor("model.norm.weight", {"final_norm": "embed"})
  if not config.tie_embeddings:
    yield Tensor("lm_head.weight", {"lm_head": "vocab embed -> embed vocab"})


def attention(config: ModelConfig, at: str, ours: str) -> Iterator[Tensor]:
  """Projections of one attention block, with norms and biases where the config has them."""
  names = {"query": "q", "key": "k", "value": "v"}
  for field, letter in names.items():
    yield Tensor(
      f"{at}{letter}_proj.weight", {f"{ours}{field}": "(heads width) embed -> embed heads width"}
    )
    if config.attention_bias:
      yield Tensor(
        f"{at}{letter}_proj.bias", {f"{ours}{field}_bias": "(heads width) -> heads width"}
      )
    if config.qk_norm and field != "value":
      yield Tensor(f"{at}{letter}_norm.weight", {f"{ours}{field}_norm": "width"})
  yield Tensor(f"{at}o_proj.weight", {f"{ours}out": "embed (heads width) -> heads width embed"})


def mlp(config: ModelConfig, at: str, ours: str) -> Iterator[Tensor]:
  """An MLP, or the expert that every token visits; ``gate_proj`` where it is gated."""
  for field in ("up",) if config.mlp_activation == "relu2" else ("gate", "up"):
    yield Tensor(f"{at}{field}_proj.weight", {f"{ours}{field}": "mlp embed -> embed mlp"})
  yield Tensor(f"{at}down_proj.weight", {f"{ours}down": "embed mlp -> mlp embed"})


def dense_tensors(config: ModelConfig) -> Iterator[Tensor]:
  """The whole map of a dense model: every layer an attention and an MLP block."""
  yield from ends(config)
  for layer in range(len(config.pattern) // 2):
    at = f"model.layers.{layer}."
    first, second = f"blocks.{2 * layer}.", f"blocks.{2 * layer + 1}."
    yield Tensor(f"{at}input_layernorm.weight", {f"{first}norm": "embed"})
    yield from attention(config, f"{at}self_attn.", f"{first}mixer.")
    yield Tensor(f"{at}post_attention_layernorm.weight", {f"{second}norm": "embed"})
    yield from mlp(config, f"{at}mlp.", f"{second}mixer.")


def dense_config(values: Mapping[str, Any], *, qk_norm: bool, bias: bool) -> ModelConfig:
  """ModelConfig of a dense model."""
  return model_config(
    values,
    pattern="*-" * get(values, "num_hidden_layers"),
    norm_eps=get(values, "rms_norm_eps"),
    tie_embeddings=get(values, "tie_word_embeddings", False),
    d_mlp=get(values, "intermediate_size"),
    mlp_activation="swiglu",
    qk_norm=qk_norm,
    attention_bias=bias,
    **attention_fields(values),
  )
