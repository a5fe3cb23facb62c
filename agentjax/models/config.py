"""Settings of a policy network: one pattern string covers dense, mixture and hybrid models."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from agentjax.config import Config, check

KINDS = {"M": "Mamba-2", "*": "attention", "-": "MLP", "E": "mixture of experts"}


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig(Config):
  """A stack of pre-norm residual blocks, one character of ``pattern`` each.

  ``M`` Mamba-2, ``*`` attention, ``-`` MLP, ``E`` mixture of experts, as in Nemotron-H
  (2504.03624); a Llama or Qwen layer is ``*-``. The defaults are a small hybrid of ours that trains
  on a CPU.

  Attributes:
    vocab_size: rows of the embedding; at least the tokenizer's vocabulary.
    d_model: width of the residual stream.
    pattern: one character a block.
    norm_eps: added to the mean square in every RMSNorm.
    tie_embeddings: use the transposed embedding as output projection.
    compute_dtype: dtype of activations and of weights in products. Logits, softmax, norms, router
      and recurrent state are float32 whatever it is.
    param_dtype: dtype the weights are stored in. A_log, D, dt_bias and the router are float32.
    init_scale: matrices start as N(0, init_scale² / fan_in); ours.
    remat: "block" recomputes each block in the backward pass and keeps only the residual stream.
    scan_unroll: repeats of a pattern unit that one step of the training scan spans. More compiles
      longer; at least the number of repeats gives a straight-line program.
    logits_chunk: time steps whose logits are held at once while scoring.
    kernels: implementation of the state space and convolution kernels; None picks the fastest.
    num_heads, num_kv_heads, head_dim: query heads, shared key/value heads, width of each.
    rope_theta: base of the rotary embedding (2104.09864, half-split layout); None is no position
      embedding, as in Nemotron-H.
    qk_norm: RMSNorm on each query and key head.
    attention_bias: add a bias to queries, keys and values.
    attention_block: queries of one attention product in training; later keys are left out of it.
    d_mlp: hidden width of ``-`` blocks.
    mlp_activation: of ``-`` and ``E`` blocks: "relu2" is ``down relu(up x)²``, "swiglu" is
      ``down (silu(gate x) * up x)``.
    mamba_heads, mamba_head_dim, mamba_state, mamba_groups: H, P, N, G of Mamba-2.
    conv_kernel: taps K of the causal convolution.
    chunk_size: tokens a chunk of the state space scan.
    dt_min, dt_max, dt_floor: steps start log-uniform in [dt_min, dt_max], at least dt_floor.
    dt_limit_low, dt_limit_high: clamp of the step after softplus; None is no upper clamp.
    num_experts, experts_per_token: routed experts E and how many of them each token visits.
    d_expert: hidden width of one routed expert.
    d_shared_expert: hidden width of the expert every token visits; 0 leaves it out.
    routed_scaling: factor on the routed sum.
    norm_topk: divide the chosen gates by their sum.
    expert_block: rows of one expert product where tokens are sorted by expert; ours.
  """

  vocab_size: int = 264
  d_model: int = 128
  pattern: str = "M*-M*-"
  norm_eps: float = 1e-5
  tie_embeddings: bool = False
  compute_dtype: Literal["float32", "bfloat16"] = "float32"
  param_dtype: Literal["float32", "bfloat16"] = "float32"
  init_scale: float = 1.0
  remat: Literal["none", "block"] = "none"
  scan_unroll: int = 1
  logits_chunk: int = 256
  kernels: Literal["reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None

  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 32
  rope_theta: float | None = None
  qk_norm: bool = False
  attention_bias: bool = False
  attention_block: int = 64

  d_mlp: int = 512
  mlp_activation: Literal["relu2", "swiglu"] = "relu2"

  mamba_heads: int = 8
  mamba_head_dim: int = 32
  mamba_state: int = 32
  mamba_groups: int = 1
  conv_kernel: int = 4
  chunk_size: int = 32
  dt_min: float = 1e-3
  dt_max: float = 1e-1
  dt_floor: float = 1e-4
  dt_limit_low: float = 0.0
  dt_limit_high: float | None = None

  num_experts: int = 8
  experts_per_token: int = 2
  d_expert: int = 128
  d_shared_expert: int = 128
  routed_scaling: float = 1.0
  norm_topk: bool = True
  expert_block: int = 128

  @property
  def residual_scale(self) -> float:
    """Shrinks what each block adds at the start, so that the stream's variance keeps to O(1)."""
    return len(self.pattern) ** -0.5

  @property
  def dtype(self) -> jnp.dtype:
    """Compute dtype as jax knows it."""
    return jnp.dtype(self.compute_dtype)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(
      bool(self.pattern) and set(self.pattern) <= set(KINDS),
      f"{path}.pattern",
      self.pattern,
      "a non-empty string of " + ", ".join(f"{k!r} ({v})" for k, v in KINDS.items()),
    )
    positive = (
      "vocab_size d_model scan_unroll logits_chunk num_heads num_kv_heads head_dim "
      "attention_block d_mlp mamba_heads mamba_head_dim mamba_state mamba_groups chunk_size "
      "num_experts experts_per_token d_expert expert_block"
    )
    for name in positive.split():
      check(getattr(self, name) >= 1, f"{path}.{name}", getattr(self, name), "at least 1")
    for name in ("norm_eps", "init_scale", "dt_floor", "routed_scaling"):
      check(getattr(self, name) > 0, f"{path}.{name}", getattr(self, name), "above 0")
    check(
      self.num_heads % self.num_kv_heads == 0,
      f"{path}.num_kv_heads",
      self.num_kv_heads,
      f"a divisor of num_heads={self.num_heads}",
    )
    check(
      self.rope_theta is None or (self.rope_theta > 1 and self.head_dim % 2 == 0),
      f"{path}.rope_theta",
      self.rope_theta,
      f"None, or above 1 with an even head_dim (head_dim={self.head_dim})",
    )
    check(
      self.mamba_heads % self.mamba_groups == 0,
      f"{path}.mamba_groups",
      self.mamba_groups,
      f"a divisor of mamba_heads={self.mamba_heads}",
    )
    check(self.conv_kernel >= 2, f"{path}.conv_kernel", self.conv_kernel, "at least 2")
    check(
      0 < self.dt_min <= self.dt_max,
      f"{path}.dt_min",
      self.dt_min,
      f"above 0 and at most dt_max={self.dt_max}",
    )
    high = float("inf") if self.dt_limit_high is None else self.dt_limit_high
    check(
      0 <= self.dt_limit_low < high,
      f"{path}.dt_limit_low",
      self.dt_limit_low,
      f"from 0 to below dt_limit_high={self.dt_limit_high}",
    )
    check(
      self.experts_per_token <= self.num_experts,
      f"{path}.experts_per_token",
      self.experts_per_token,
      f"at most num_experts={self.num_experts}",
    )
    check(self.d_shared_expert >= 0, f"{path}.d_shared_expert", self.d_shared_expert, "0 or more")
