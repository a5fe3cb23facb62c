"""Nemotron-H and Nemotron 3 (2504.03624, 2512.20856): Mamba, attention, MLP and mixture blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjax.adapters.model_families import mamba2, transformer
from agentjax.config import ConfigError
from agentjax.models.config import ModelConfig, MtpConfig
from agentjax.models.huggingface.mapping import Family, OneOf, Tensor

_KINDS = {
  "linear_attention": "M",
  "mamba": "M",
  "full_attention": "*",
  "attention": "*",
  "moe": "E",
  "mlp": "-",
}
_ALIASES = {
  "mamba_n_groups": "n_groups",
  "mamba_d_conv": "conv_kernel",
  "mamba_expand": "expand",
  "mamba_dt_min": "time_step_min",
  "mamba_dt_max": "time_step_max",
  "mamba_dt_limit": "time_step_limit",
  "mamba_dt_init_floor": "time_step_floor",
  "mamba_conv_bias": "use_conv_bias",
  "mamba_chunk_size": "chunk_size",
  "attention_head_dim": "head_dim",
  "num_local_experts": "n_routed_experts",
  "layer_types": "layers_block_type",
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """See ``Family``. Attention is without position embedding, whatever ``rope_theta`` says.

  ``time_step_min`` only sets where steps start; the clamp is ``time_step_limit``.
  """
  values = transformer.renamed(values, _ALIASES)
  for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"):
    transformer.require(values, key, False)
  transformer.require(values, "use_conv_bias", True)
  transformer.require(values, "mlp_hidden_act", "relu2")
  transformer.require(values, "mamba_hidden_act", "silu")
  transformer.require(values, "n_shared_experts", 1)
  if values.get("sliding_window") is not None:
    raise ConfigError(
      f"config.json sliding_window={values['sliding_window']!r} is not supported; supported: null."
    )
  pattern, mtp = _pattern(values), _mtp(values)
  kinds = pattern + (mtp.pattern if mtp is not None else "")
  return transformer.model_config(
    values,
    pattern=pattern,
    norm_eps=transformer.get(values, "layer_norm_epsilon", 1e-5),
    tie_embeddings=False,  # transformers reads the file's head whatever tie_word_embeddings says
    mlp_activation="relu2",
    rope_theta=None,
    **(_attention_fields(values) if "*" in kinds else {}),
    **({"d_mlp": transformer.get(values, "intermediate_size")} if "-" in kinds else {}),
    **(_mamba_fields(values) if "M" in kinds else {}),
    **(_mixture_fields(values) if "E" in kinds else {}),
    mtp=mtp,
  )


def _pattern(values: Mapping[str, Any]) -> str:
  names = values.get("layers_block_type")
  if names is None:
    return transformer.get(values, "hybrid_override_pattern")
  return _letters(names, "layers_block_type")


def _letters(names: Sequence[str], key: str) -> str:
  unknown = sorted(set(names) - set(_KINDS))
  if unknown:
    raise ConfigError(f"config.json {key} has {unknown}; supported: {', '.join(_KINDS)}.")
  return "".join(_KINDS[name] for name in names)


def _mtp(values: Mapping[str, Any]) -> MtpConfig | None:
  """Layers that predict further ahead, ``num_nextn_predict_layers`` of them."""
  depths = transformer.get(values, "num_nextn_predict_layers", 0)
  if not depths:
    return None
  names = values.get("mtp_layers_block_type")
  pattern = transformer.get(values, "mtp_hybrid_override_pattern", "*E")
  return MtpConfig(
    depths=depths,
    pattern=pattern if names is None else _letters(names, "mtp_layers_block_type"),
    shared=transformer.get(values, "mtp_use_repeated_layer", depths == 1),
  )


def _attention_fields(values: Mapping[str, Any]) -> dict[str, Any]:
  heads = transformer.get(values, "num_attention_heads")
  return {
    "num_heads": heads,
    "num_kv_heads": transformer.get(values, "num_key_value_heads", heads),
    "head_dim": transformer.get(values, "head_dim"),
  }


def _mamba_fields(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "mamba_heads": transformer.get(values, "mamba_num_heads"),
    "mamba_head_dim": transformer.get(values, "mamba_head_dim"),
    "mamba_state": transformer.get(values, "ssm_state_size"),
    **mamba2.mamba_fields(values),
  }


def _mixture_fields(values: Mapping[str, Any]) -> dict[str, Any]:
  shared = transformer.get(values, "moe_shared_expert_intermediate_size")
  if shared < 1:
    raise ConfigError(
      f"config.json moe_shared_expert_intermediate_size={shared!r}; supported: 1 or more."
    )
  return {
    "num_experts": transformer.get(values, "n_routed_experts"),
    "experts_per_token": transformer.get(values, "num_experts_per_tok"),
    "d_expert": transformer.get(values, "moe_intermediate_size"),
    "d_shared_expert": shared,
    "routed_scaling": transformer.get(values, "routed_scaling_factor", 1.0),
    "norm_topk": transformer.get(values, "norm_topk_prob", True),
    "num_expert_groups": transformer.get(values, "n_group", 1),
    "expert_groups_per_token": transformer.get(values, "topk_group", 1),
    "latent_size": values.get("moe_latent_size") or 0,
    "router_scores": "sigmoid",
  }


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """See ``Family``."""
  kinds = config.pattern + (config.mtp.pattern if config.mtp is not None else "")
  if "E" in kinds and not config.d_shared_expert:
    raise ConfigError("d_shared_expert=0, but its mixture blocks have a shared expert")
  return {
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "num_hidden_layers": len(config.pattern),
    "hybrid_override_pattern": config.pattern,
    "layer_norm_epsilon": config.norm_eps,
    "tie_word_embeddings": False,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "attention_bias": False,
    "intermediate_size": config.d_mlp,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "mamba_num_heads": config.mamba_heads,
    "mamba_head_dim": config.mamba_head_dim,
    "ssm_state_size": config.mamba_state,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    **mamba2.mamba_to_hf(config),
    "n_routed_experts": config.num_experts,
    "n_shared_experts": 1,
    "num_experts_per_tok": config.experts_per_token,
    "moe_intermediate_size": config.d_expert,
    "moe_shared_expert_intermediate_size": config.d_shared_expert,
    "moe_latent_size": config.latent_size or None,
    "routed_scaling_factor": config.routed_scaling,
    "norm_topk_prob": config.norm_topk,
    "n_group": config.num_expert_groups,
    "topk_group": config.expert_groups_per_token,
    **_mtp_to_hf(config.mtp),
  }


def _mtp_to_hf(mtp: MtpConfig | None) -> dict[str, Any]:
  if mtp is None:
    return {"num_nextn_predict_layers": 0}
  return {
    "num_nextn_predict_layers": mtp.depths,
    "mtp_hybrid_override_pattern": mtp.pattern,
    "mtp_use_repeated_layer": mtp.shared,
  }


def tensors(config: ModelConfig) -> Iterator[Tensor | OneOf]:
  """See ``Family``."""
  yield from mamba2.ends(config)
  for layer, kind in enumerate(config.pattern):
    at, ours = f"backbone.layers.{layer}.", f"blocks.{layer}."
    yield Tensor(f"{at}norm.weight", {f"{ours}norm": "embed"})
    yield from _mixer(config, kind, f"{at}mixer.", f"{ours}mixer.")
  if config.mtp is not None:
    yield from _ahead(config, config.mtp)


def _ahead(config: ModelConfig, mtp: MtpConfig) -> Iterator[Tensor | OneOf]:
  """Layers that predict further ahead, one a depth that has weights of its own."""
  blocks = len(mtp.pattern)
  for depth in range(1 if mtp.shared else mtp.depths):
    first, last = (f"mtp.layers.{depth * blocks + i}." for i in (0, blocks - 1))
    yield Tensor(f"{first}enorm.weight", {f"mtp.token_norm[{depth}]": "embed"})
    yield Tensor(f"{first}hnorm.weight", {f"mtp.hidden_norm[{depth}]": "embed"})
    yield Tensor(f"{first}eh_proj.weight", {f"mtp.join[{depth}]": "embed both -> both embed"})
    for i, kind in enumerate(mtp.pattern):
      at = f"mtp.layers.{depth * blocks + i}."
      for entry in (
        Tensor(f"{at}norm.weight", {f"mtp.blocks.{i}.norm": "embed"}),
        *_mixer(config, kind, f"{at}mixer.", f"mtp.blocks.{i}.mixer."),
      ):
        yield entry.at(depth)
    yield Tensor(f"{last}final_layernorm.weight", {f"mtp.final_norm[{depth}]": "embed"})


def _mixer(config: ModelConfig, kind: str, at: str, ours: str) -> Iterator[Tensor | OneOf]:
  """The mixer of one block."""
  match kind:
    case "M":
      yield from mamba2.mixer(at, ours)
    case "*":
      yield from transformer.attention(config, at, ours)
    case "-":
      yield from transformer.mlp(config, at, ours)
    case "E":
      yield from _mixture(config, at, ours)


def _mixture(config: ModelConfig, at: str, ours: str) -> Iterator[Tensor | OneOf]:
  yield Tensor(f"{at}gate.weight", {f"{ours}router": "experts embed -> embed experts"})
  yield Tensor(f"{at}gate.e_score_correction_bias", {f"{ours}router_bias": "experts"}, dtype="F32")
  up, down = "mlp into -> experts into mlp", "into mlp -> experts mlp into"
  yield OneOf((
    (
      Tensor(f"{at}experts.{{experts}}.up_proj.weight", {f"{ours}expert_up": up}),
      Tensor(f"{at}experts.{{experts}}.down_proj.weight", {f"{ours}expert_down": down}),
    ),
    (
      Tensor(f"{at}experts.up_proj", {f"{ours}expert_up": f"experts {up}"}),
      Tensor(f"{at}experts.down_proj", {f"{ours}expert_down": f"experts {down}"}),
    ),
  ))  # fmt: skip
  yield from transformer.mlp(config, f"{at}shared_experts.", f"{ours}shared.")
  if config.latent_size:
    yield Tensor(
      f"{at}fc1_latent_proj.weight", {f"{ours}latent_down": "latent embed -> embed latent"}
    )
    yield Tensor(
      f"{at}fc2_latent_proj.weight", {f"{ours}latent_up": "embed latent -> latent embed"}
    )


FAMILY = Family(
  model_type="nemotron_h",
  architecture="NemotronHForCausalLM",
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  tensors=tensors,
  prefixes={"model.": "backbone."},
  # overrides={"mtp": None} leaves out the layers that predict further ahead, as transformers does.
  ignored=(r"mtp\..*",),
)
