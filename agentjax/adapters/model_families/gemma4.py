"""Gemma 4, the text model: alone, or inside a checkpoint with towers for images and sound."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.adapters.model_families.gemma4_block import LAYERS, Layer
from agentjax.config import ConfigError
from agentjax.models.config import Gemma4Config, ModelConfig
from agentjax.models.huggingface.mapping import Absent, Family, Tensor

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ROPE: dict[str, dict[str, Any]] = {
  _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
  _GLOBAL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  outer = {key: values[key] for key in ("dtype", "torch_dtype") if values.get(key)}
  values = {**outer, **values.get("text_config", values)}
  transformer.require(values, "attention_bias", False)
  transformer.require(values, "hidden_activation", "gelu_pytorch_tanh")
  transformer.require(values, "use_bidirectional_attention", "vision")
  per_layer = transformer.get(values, "hidden_size_per_layer_input", 256)
  vocab = transformer.get(values, "vocab_size")
  if per_layer:
    rows = transformer.get(values, "vocab_size_per_layer_input", 262_144)
    transformer.require({"vocab_size_per_layer_input": rows}, "vocab_size_per_layer_input", vocab)
  types = _layer_types(values)
  pattern = _pattern(values, types)
  if values.get("rope_scaling"):
    raise ConfigError("config.json rope_scaling is not supported; supported: rope_parameters.")
  rope = values.get("rope_parameters") or _ROPE
  _check_rope(rope)
  global_dim, global_heads = _global_heads(values, types)
  mixture = {}
  if values.get("enable_moe_block"):
    mixture = {
      "num_experts": transformer.get(values, "num_experts"),
      "experts_per_token": transformer.get(values, "top_k_experts"),
      "d_expert": transformer.get(values, "moe_intermediate_size"),
      "d_shared_expert": 0,
      "router_scores": "softmax",
      "expert_scale": True,
    }
  return transformer.model_config(
    values,
    pattern=pattern,
    norm_eps=transformer.get(values, "rms_norm_eps", 1e-6),
    tie_embeddings=transformer.get(values, "tie_word_embeddings", True),
    num_heads=transformer.get(values, "num_attention_heads"),
    num_kv_heads=transformer.get(values, "num_key_value_heads"),
    head_dim=transformer.get(values, "head_dim", 256),
    rope_theta=float(transformer.get(rope[_LOCAL], "rope_theta")),
    d_mlp=transformer.get(values, "intermediate_size"),
    mlp_activation="geglu",
    gemma=Gemma4Config(
      window=transformer.get(values, "sliding_window", 512),
      global_kv_heads=global_heads,
      global_head_dim=global_dim,
      global_rope_theta=float(transformer.get(rope[_GLOBAL], "rope_theta")),
      global_rope_fraction=float(transformer.get(rope[_GLOBAL], "partial_rotary_factor", 1.0)),
      global_key_is_value=transformer.get(values, "attention_k_eq_v", False),
      per_layer_width=per_layer,
      readers_double_mlp=transformer.get(values, "use_double_wide_mlp", False),
      logit_softcap=values.get("final_logit_softcapping"),
    ),
    **mixture,
  )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """See ``Family``."""
  gemma = config.gemma
  if gemma is None:
    raise ConfigError("config.gemma=None; a Gemma 4 model has it")
  layers = [LAYERS[kind] for kind in config.pattern]
  mixes = any(layer.mixes for layer in layers)
  rope = {kind: dict(values) for kind, values in _ROPE.items()}
  rope[_LOCAL]["rope_theta"] = config.rope_theta
  rope[_GLOBAL]["rope_theta"] = gemma.global_rope_theta
  rope[_GLOBAL]["partial_rotary_factor"] = gemma.global_rope_fraction
  return {
    "vocab_size": config.vocab_size,
    "vocab_size_per_layer_input": config.vocab_size,
    "hidden_size": config.d_model,
    "hidden_size_per_layer_input": gemma.per_layer_width,
    "intermediate_size": config.d_mlp,
    "use_double_wide_mlp": gemma.readers_double_mlp,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": len(layers),
    "layer_types": [_GLOBAL if layer.is_global else _LOCAL for layer in layers],
    "num_kv_shared_layers": sum(layer.reads for layer in layers),
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "num_global_key_value_heads": gemma.global_kv_heads,
    "head_dim": config.head_dim,
    "global_head_dim": gemma.global_head_dim,
    "attention_k_eq_v": gemma.global_key_is_value,
    "sliding_window": gemma.window,
    "rope_parameters": rope,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "final_logit_softcapping": gemma.logit_softcap,
    "enable_moe_block": mixes,
    "num_experts": config.num_experts if mixes else None,
    "top_k_experts": config.experts_per_token if mixes else None,
    "moe_intermediate_size": config.d_expert if mixes else None,
  }


def tensors(config: ModelConfig) -> Iterator[Tensor | Absent]:
  """See ``Family``."""
  assert config.gemma is not None, "validate() sees to it"
  yield from transformer.ends(config)
  if config.gemma.per_layer_width:
    yield Tensor(
      "model.embed_tokens_per_layer.weight",
      {"per_layer.table": "vocab (layers width) -> vocab layers width"},
    )
    yield Tensor(
      "model.per_layer_model_projection.weight",
      {"per_layer.projection": "(layers width) embed -> embed layers width"},
    )
    yield Tensor("model.per_layer_projection_norm.weight", {"per_layer.norm": "width"})
  for i, kind in enumerate(config.pattern):
    at, ours = f"model.layers.{i}.", f"blocks.{i}."
    norms = {
      "input_layernorm": "attention_norm",
      "post_attention_layernorm": "attention_out_norm",
      "pre_feedforward_layernorm": "mlp_norm",
      "post_feedforward_layernorm": "mlp_out_norm",
    }
    for theirs, field in norms.items():
      yield Tensor(f"{at}{theirs}.weight", {f"{ours}{field}": "embed"})
    yield from _attention(config.gemma, LAYERS[kind], f"{at}self_attn.", f"{ours}attention.")
    yield from transformer.mlp(config, f"{at}mlp.", f"{ours}mlp.")
    if LAYERS[kind].mixes:
      yield from _mixture(at, f"{ours}mixture.")
    if config.gemma.per_layer_width:
      gate = f"{ours}per_layer."
      yield Tensor(
        f"{at}per_layer_input_gate.weight", {f"{gate}gate": "width embed -> embed width"}
      )
      yield Tensor(f"{at}per_layer_projection.weight", {f"{gate}up": "embed width -> width embed"})
      yield Tensor(f"{at}post_per_layer_input_norm.weight", {f"{gate}out_norm": "embed"})
    yield Tensor(f"{at}layer_scalar", {f"{ours}scale": "one"})


def _layer_types(values: Mapping[str, Any]) -> list[str]:
  """One of two names a layer; without them every sixth and the last layer are global."""
  count = transformer.get(values, "num_hidden_layers")
  types = values.get("layer_types") or [
    _LOCAL if (i + 1) % 6 and i + 1 < count else _GLOBAL for i in range(count)
  ]
  if len(types) != count or not set(types) <= {_LOCAL, _GLOBAL}:
    raise ConfigError(
      f"config.json layer_types={types!r} is not supported; supported: {count} times {_LOCAL!r} or "
      f"{_GLOBAL!r}."
    )
  return list(types)


def _pattern(values: Mapping[str, Any], types: Sequence[str]) -> str:
  """A character a layer; the last layer of each kind before the readers is the one they read."""
  mixes = bool(values.get("enable_moe_block"))
  first_reader = len(types) - transformer.get(values, "num_kv_shared_layers", 0)
  if first_reader < len(types) and mixes:
    raise ConfigError(
      "config.json enable_moe_block=true with num_kv_shared_layers above 0 is not supported."
    )
  own = types[:first_reader]
  readers = set(types[first_reader:])
  if not readers <= set(own):
    raise ConfigError(
      f"config.json num_kv_shared_layers leaves no layer of {sorted(readers - set(own))} to read."
    )
  lenders = {kind: len(own) - 1 - own[::-1].index(kind) for kind in readers}
  chars = {layer: char for char, layer in LAYERS.items()}
  return "".join(
    chars[
      Layer(
        is_global=kind == _GLOBAL,
        lends=lenders.get(kind) == i,
        reads=i >= first_reader,
        mixes=mixes,
      )
    ]
    for i, kind in enumerate(types)
  )


def _global_heads(values: Mapping[str, Any], types: Sequence[str]) -> tuple[int, int]:
  """Head width and number of key heads of global layers."""
  heads = transformer.get(values, "num_key_value_heads")
  apart = values.get("per_layer_config")
  if apart is None:
    own = values.get("num_global_key_value_heads") if values.get("attention_k_eq_v") else None
    return transformer.get(values, "global_head_dim", 512), own or heads
  width = transformer.get(values, "head_dim", 256)
  found = {_LOCAL: {(width, heads)}, _GLOBAL: set()}
  for i, kind in enumerate(types):
    layer = apart.get(str(i)) or {}
    found[kind].add((layer.get("head_dim", width), layer.get("num_key_value_heads", heads)))
  if any(len(sizes) > 1 for sizes in found.values()):
    raise ConfigError(
      "config.json per_layer_config is not supported where layers of one kind differ or sliding "
      f"ones leave head_dim={width} and num_key_value_heads={heads}; got {apart!r}."
    )
  return next(iter(found[_GLOBAL]), (width, heads))


def _check_rope(rope: Mapping[str, Mapping[str, Any]]) -> None:
  for kind, values in _ROPE.items():
    given = rope.get(kind) or {}
    if given.get("rope_type") != values["rope_type"] or given.get("factor", 1.0) != 1.0:
      raise ConfigError(
        f"config.json rope_parameters.{kind}={given!r} is not supported; supported: rope_type "
        f"{values['rope_type']!r} without a factor."
      )


def _attention(gemma: Gemma4Config, layer: Layer, at: str, ours: str) -> Iterator[Tensor]:
  fields = {"query": "q"}
  if not layer.reads:
    fields["key"] = "k"
    if not (layer.is_global and gemma.global_key_is_value):
      fields["value"] = "v"
  for field, letter in fields.items():
    yield Tensor(
      f"{at}{letter}_proj.weight", {f"{ours}{field}": "(heads width) embed -> embed heads width"}
    )
    if field != "value":
      yield Tensor(f"{at}{letter}_norm.weight", {f"{ours}{field}_norm": "width"})
  yield Tensor(f"{at}o_proj.weight", {f"{ours}out": "embed (heads width) -> heads width embed"})


def _mixture(at: str, ours: str) -> Iterator[Tensor | Absent]:
  yield Tensor(f"{at}router.proj.weight", {f"{ours}moe.router": "experts embed -> embed experts"})
  yield Tensor(f"{at}router.scale", {f"{ours}router_scale": "embed"})
  yield Tensor(f"{at}router.per_expert_scale", {f"{ours}moe.expert_scale": "experts"})
  yield Absent(f"{ours}moe.router_bias")
  joined = "experts mlp+ embed -> experts embed mlp"
  yield Tensor(
    f"{at}experts.gate_up_proj",
    {f"{ours}moe.expert_gate": joined, f"{ours}moe.expert_up": joined},
  )
  yield Tensor(
    f"{at}experts.down_proj", {f"{ours}moe.expert_down": "experts embed mlp -> experts mlp embed"}
  )
  norms = {
    "pre_feedforward_layernorm_2": "norm",
    "post_feedforward_layernorm_2": "out_norm",
    "post_feedforward_layernorm_1": "mlp_out_norm",
  }
  for theirs, field in norms.items():
    yield Tensor(f"{at}{theirs}.weight", {f"{ours}{field}": "embed"})


TEXT_FAMILY = Family(
  model_type="gemma4_text",
  architecture="Gemma4ForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  tensors=tensors,
  # Layers that read the keys and values of others are published with projections of their own.
  ignored=(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",),
)
# Text models are written as "gemma4_text", which says the same.
FAMILY = dataclasses.replace(
  TEXT_FAMILY,
  model_type="gemma4",
  architecture="Gemma4ForConditionalGeneration",
  prefixes={"model.language_model.": "model."},
  ignored=(
    *TEXT_FAMILY.ignored,
    r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
  ),
)
