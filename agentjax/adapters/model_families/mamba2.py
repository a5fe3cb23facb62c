"""Mamba-2 (2405.21060), nothing but Mamba blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.adapters.model_families import transformer
from agentjax.config import ConfigError
from agentjax.models.config import ModelConfig
from agentjax.models.huggingface.mapping import Family, Tensor


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``."""
  transformer.require(values, "hidden_act", "silu")
  transformer.require(values, "use_bias", False)
  transformer.require(values, "use_conv_bias", True)
  return transformer.model_config(
    values,
    pattern="M" * transformer.get(values, "num_hidden_layers"),
    norm_eps=transformer.get(values, "layer_norm_epsilon", 1e-5),
    tie_embeddings=transformer.get(values, "tie_word_embeddings", False),
    mamba_heads=transformer.get(values, "num_heads"),
    mamba_head_dim=transformer.get(values, "head_dim"),
    mamba_state=transformer.get(values, "state_size"),
    **mamba_fields(values),
  )


def mamba_fields(values: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of Mamba blocks whose keys are the same in every family."""
  limits = transformer.get(values, "time_step_limit", (0.0, math.inf))
  if len(limits) != 2:
    raise ConfigError(f"config.json time_step_limit={limits!r}; supported: [lowest, highest].")
  low, high = map(_number, limits)
  return {
    "mamba_groups": transformer.get(values, "n_groups", 8),
    "conv_kernel": transformer.get(values, "conv_kernel", 4),
    "chunk_size": transformer.get(values, "chunk_size", 128),
    "dt_min": transformer.get(values, "time_step_min", 1e-3),
    "dt_max": transformer.get(values, "time_step_max", 1e-1),
    "dt_floor": transformer.get(values, "time_step_floor", 1e-4),
    "dt_limit_low": low,
    "dt_limit_high": None if math.isinf(high) else high,
  }


def _number(value: Any) -> float:
  """transformers writes infinity as ``{"__float__": "Infinity"}``."""
  return float(value["__float__"] if isinstance(value, dict) else value)


def mamba_to_hf(config: ModelConfig) -> dict[str, Any]:
  """Inverse of ``mamba_fields``."""
  high = math.inf if config.dt_limit_high is None else config.dt_limit_high
  return {
    "n_groups": config.mamba_groups,
    "conv_kernel": config.conv_kernel,
    "chunk_size": config.chunk_size,
    "time_step_min": config.dt_min,
    "time_step_max": config.dt_max,
    "time_step_floor": config.dt_floor,
    "time_step_limit": [config.dt_limit_low, high],
    "use_bias": False,
    "use_conv_bias": True,
  }


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """See ``Family``."""
  inner = config.mamba_heads * config.mamba_head_dim
  if inner % config.d_model:
    raise ConfigError(
      f"mamba_heads * mamba_head_dim = {inner} is no multiple of d_model={config.d_model}"
    )
  return {
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "num_hidden_layers": len(config.pattern),
    "layer_norm_epsilon": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "num_heads": config.mamba_heads,
    "head_dim": config.mamba_head_dim,
    "state_size": config.mamba_state,
    "expand": inner // config.d_model,
    "hidden_act": "silu",
    **mamba_to_hf(config),
  }


def ends(config: ModelConfig) -> Iterator[Tensor]:
  """Embedding, last norm and output projection."""
  yield Tensor("backbone.embeddings.weight", {"embedding": "vocab embed"})
  yield Tensor("backbone.norm_f.weight", {"final_norm": "embed"})
  if not config.tie_embeddings:
    yield Tensor("lm_head.weight", {"lm_head": "vocab embed -> embed vocab"})


def mixer(at: str, ours: str) -> Iterator[Tensor]:
  """One Mamba block; ``in_proj`` is z | x | B | C | dt and the convolution x | B | C."""
  head, group = "(heads width)+", "(groups state)+"
  into = {"gate": head, "x": head, "b": group, "c": group, "step": "heads+"}
  yield Tensor(
    f"{at}in_proj.weight",
    {f"{ours}{field}": f"{rows} embed -> embed {_axes(rows)}" for field, rows in into.items()},
  )
  mixed = {"conv_x": head, "conv_b": group, "conv_c": group}
  yield Tensor(
    f"{at}conv1d.weight",
    {f"{ours}{field}": f"{rows} 1 tap -> tap {_axes(rows)}" for field, rows in mixed.items()},
  )
  yield Tensor(
    f"{at}conv1d.bias",
    {f"{ours}{field}_bias": f"{rows} -> {_axes(rows)}" for field, rows in mixed.items()},
  )
  yield Tensor(f"{at}dt_bias", {f"{ours}step_bias": "heads"})
  yield Tensor(f"{at}A_log", {f"{ours}decay_rate": "heads"})
  yield Tensor(f"{at}D", {f"{ours}skip": "heads"})
  yield Tensor(f"{at}norm.weight", {f"{ours}norm": "(heads width) -> heads width"})
  yield Tensor(f"{at}out_proj.weight", {f"{ours}out": "embed (heads width) -> heads width embed"})


def _axes(rows: str) -> str:
  return rows.strip("()+")


def tensors(config: ModelConfig) -> Iterator[Tensor]:
  """See ``Family``."""
  yield from ends(config)
  for layer in range(len(config.pattern)):
    yield Tensor(f"backbone.layers.{layer}.norm.weight", {f"blocks.{layer}.norm": "embed"})
    yield from mixer(f"backbone.layers.{layer}.mixer.", f"blocks.{layer}.mixer.")


FAMILY = Family(
  model_type="mamba2",
  architecture="Mamba2ForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  tensors=tensors,
)
