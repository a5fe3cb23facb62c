"""Published architectures as values: ``model_preset("nemotron3_super_120b_a12b")``.

Dimensions are those of the checkpoints' config.json. ``agentjax.models.load_pretrained`` reads the
same from a Hugging Face folder; these serve to plan, to test and to train from scratch. Weights
compute in bfloat16 as published; change a field with ``dataclasses.replace``.
"""

from __future__ import annotations

import copy
import dataclasses

from agentjax.config import ConfigError
from agentjax.models.config import (
  Gemma4Config,
  LoopConfig,
  MlaConfig,
  ModelConfig,
  SecondPassConfig,
)

_NEMOTRON = ModelConfig(
  vocab_size=131072,
  norm_eps=1e-5,
  compute_dtype="bfloat16",
  num_kv_heads=2,
  head_dim=128,
  mamba_head_dim=64,
  mamba_state=128,
  mamba_groups=8,
  chunk_size=128,
)

# Nemotron 3 Nano, 2512.20848.
NEMOTRON3_NANO_30B_A3B = dataclasses.replace(
  _NEMOTRON,
  d_model=2688,
  pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
  num_heads=32,
  mamba_heads=64,
  num_experts=128,
  experts_per_token=6,
  d_expert=1856,
  d_shared_expert=3712,
  routed_scaling=2.5,
)
# Nemotron 3 Super, 2604.12374; its prediction heads are config.mtp (two depths of one layer).
NEMOTRON3_SUPER_120B_A12B = dataclasses.replace(
  _NEMOTRON,
  d_model=4096,
  pattern=(
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
  ),
  num_heads=32,
  mamba_heads=128,
  num_experts=512,
  experts_per_token=22,
  d_expert=2688,
  d_shared_expert=5376,
  latent_size=1024,
  routed_scaling=5.0,
)
# Nemotron 3 Ultra: the same at twice the width.
NEMOTRON3_ULTRA_550B_A55B = dataclasses.replace(
  _NEMOTRON,
  d_model=8192,
  pattern=(
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*"
    "EMEMEMEM*EMEMEMEME"
  ),
  num_heads=64,
  mamba_heads=256,
  num_experts=512,
  experts_per_token=22,
  d_expert=5120,
  d_shared_expert=10240,
  latent_size=2048,
  routed_scaling=5.0,
)
NEMOTRON3_NANO_4B = dataclasses.replace(
  _NEMOTRON,
  d_model=3136,
  pattern="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
  num_heads=40,
  num_kv_heads=8,
  d_mlp=12544,
  mamba_heads=96,
  mamba_head_dim=80,
)

_TRANSFORMER = ModelConfig(
  compute_dtype="bfloat16", head_dim=128, mlp_activation="swiglu", d_shared_expert=0
)

# Llama 3.1, 2407.21783.
LLAMA3_1_8B = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=128256,
  d_model=4096,
  pattern="*-" * 32,
  num_heads=32,
  num_kv_heads=8,
  rope_theta=5e5,
  rope_scaling_factor=8.0,
  rope_low_freq_factor=1.0,
  rope_high_freq_factor=4.0,
  rope_original_length=8192,
  d_mlp=14336,
)
# Qwen 2.5, 2412.15115.
QWEN2_5_1_5B = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=151936,
  d_model=1536,
  pattern="*-" * 28,
  norm_eps=1e-6,
  tie_embeddings=True,
  num_heads=12,
  num_kv_heads=2,
  attention_bias=True,
  rope_theta=1e6,
  d_mlp=8960,
)
QWEN2_5_7B = dataclasses.replace(
  QWEN2_5_1_5B,
  vocab_size=152064,
  d_model=3584,
  tie_embeddings=False,
  num_heads=28,
  num_kv_heads=4,
  d_mlp=18944,
)
# Qwen3, 2505.09388.
QWEN3_0_6B = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=151936,
  d_model=1024,
  pattern="*-" * 28,
  norm_eps=1e-6,
  tie_embeddings=True,
  num_heads=16,
  num_kv_heads=8,
  qk_norm=True,
  rope_theta=1e6,
  d_mlp=3072,
)
QWEN3_8B = dataclasses.replace(
  QWEN3_0_6B,
  d_model=4096,
  pattern="*-" * 36,
  tie_embeddings=False,
  num_heads=32,
  d_mlp=12288,
)
QWEN3_30B_A3B = dataclasses.replace(
  QWEN3_8B,
  d_model=2048,
  pattern="*E" * 48,
  num_kv_heads=4,
  num_experts=128,
  experts_per_token=8,
  d_expert=768,
  router_scores="softmax",
)
# Youtu-LLM, 2512.24618: matrices into the stream's width start as N(0, 4 / (5 d_model)).
YOUTU_LLM_2B = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=128256,
  d_model=2048,
  pattern="A-" * 32,
  norm_eps=1e-6,
  tie_embeddings=True,
  init_scale=2 * 5**-0.5,
  num_heads=16,
  rope_theta=1.6e6,
  mla=MlaConfig(),
  d_mlp=6144,
)
# LongCat-Flash, 2509.01322.
LONGCAT_FLASH_560B = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=131072,
  d_model=6144,
  pattern="S" * 28,
  num_heads=64,
  rope_theta=1e7,
  mla=MlaConfig(align_variance=True),
  d_mlp=12288,
  num_experts=512,
  zero_experts=256,
  experts_per_token=12,
  d_expert=2048,
  router_scores="softmax",
  norm_topk=False,
  routed_scaling=6.0,
  router_bias_rule="proportional",
  active_experts=8,
)
_GEMMA = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=262144,
  norm_eps=1e-6,
  tie_embeddings=True,
  head_dim=256,
  rope_theta=1e4,
  mlp_activation="geglu",
)
# Gemma 4, the text models.
GEMMA4_E2B = dataclasses.replace(
  _GEMMA,
  d_model=1536,
  pattern="llllg" * 2 + "lllLG" + "rrrrR" * 4,
  num_heads=8,
  num_kv_heads=1,
  d_mlp=6144,
  gemma=Gemma4Config(),
)
GEMMA4_E4B = dataclasses.replace(
  _GEMMA,
  d_model=2560,
  pattern="lllllg" * 3 + "llllLG" + "rrrrrR" * 3,
  num_heads=8,
  num_kv_heads=2,
  d_mlp=10240,
  gemma=Gemma4Config(global_kv_heads=2, readers_double_mlp=False),
)
GEMMA4_31B = dataclasses.replace(
  _GEMMA,
  d_model=5376,
  pattern="lllllg" * 10,
  num_heads=32,
  num_kv_heads=16,
  d_mlp=21504,
  gemma=Gemma4Config(
    window=1024,
    global_kv_heads=4,
    global_key_is_value=True,
    per_layer_width=0,
    readers_double_mlp=False,
  ),
)
GEMMA4_26B_A4B = dataclasses.replace(
  _GEMMA,
  d_model=2816,
  pattern="xxxxxX" * 5,
  num_heads=16,
  num_kv_heads=8,
  d_mlp=2112,
  num_experts=128,
  experts_per_token=8,
  d_expert=704,
  router_scores="softmax",
  expert_scale=True,
  gemma=Gemma4Config(
    window=1024,
    global_kv_heads=2,
    global_key_is_value=True,
    per_layer_width=0,
    readers_double_mlp=False,
  ),
)
# Mamba-2, 2405.21060.
MAMBA2_2_7B = ModelConfig(
  vocab_size=50288,
  d_model=2560,
  pattern="M" * 64,
  tie_embeddings=True,
  compute_dtype="bfloat16",
  mamba_heads=80,
  mamba_head_dim=64,
  mamba_state=128,
  mamba_groups=1,
  chunk_size=256,
)

# Parcae, 2604.12946: eight layers each before, in and after the loop. Without its value embeddings,
# which are nearly half of its parameters. No width of the MLP is given; four times d_model is ours.
PARCAE_1_3B = ModelConfig(
  vocab_size=32768,
  d_model=1536,
  pattern="*-" * 24,
  tie_embeddings=True,
  compute_dtype="bfloat16",
  num_heads=12,
  num_kv_heads=12,
  head_dim=128,
  qk_norm=True,
  rope_theta=1e4,
  d_mlp=6144,
  loop=LoopConfig(prelude=16, coda=16, mean_depth=8),
)
# LoopCoder of the IQuest-Coder-V1 report, 40B; the base of its rotary embedding is ours.
IQUEST_LOOPCODER_40B = dataclasses.replace(
  _TRANSFORMER,
  vocab_size=76800,
  d_model=5120,
  pattern="*-" * 80,
  num_heads=40,
  num_kv_heads=8,
  rope_theta=5e5,
  d_mlp=27648,
  second_pass=SecondPassConfig(),
)

_PRESETS = {
  name.lower(): value for name, value in list(globals().items()) if isinstance(value, ModelConfig)
}


def model_preset(name: str) -> ModelConfig:
  """A fresh copy of a published architecture, to be changed and frozen by the caller.

  Raises:
    ConfigError: an unknown name; the message lists the known ones.
  """
  if name not in _PRESETS:
    raise ConfigError(f"model preset {name!r}; allowed: {', '.join(model_presets())}.")
  return copy.deepcopy(_PRESETS[name])


def model_presets() -> tuple[str, ...]:
  """Their names."""
  return tuple(name for name in _PRESETS if not name.startswith("_"))
