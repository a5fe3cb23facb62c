"""Settings of a policy network: one pattern string covers dense, mixture and hybrid models."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

import jax.numpy as jnp

from agentjax.config import (
  AtLeastTwo,
  Config,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Range,
  Share,
)

KINDS = {
  "M": "Mamba-2",
  "*": "attention",
  "-": "MLP",
  "E": "mixture of experts",
  "A": "latent attention",
  "S": "LongCat-Flash layer",
  "l": "Gemma 4 layer, local",
  "g": "Gemma 4 layer, global",
  "L": "Gemma 4 layer, local, its keys and values are lent to 'r'",
  "G": "Gemma 4 layer, global, its keys and values are lent to 'R'",
  "r": "Gemma 4 layer, local, reads the keys and values of 'L'",
  "R": "Gemma 4 layer, global, reads the keys and values of 'G'",
  "V": "attention, with a value embedding",
  "x": "Gemma 4 layer, local, with a mixture of experts",
  "X": "Gemma 4 layer, global, with a mixture of experts",
}
BUILT_IN = frozenset(KINDS)  # the others are of ``register_block``
GEMMA_KINDS = "lgLGrRxX"
EXACT_KINDS = "M*-EA"  # what ``exact_chunk`` holds for
SIGHTED_KINDS = "*-EA"  # whose tokens can be told what they see
Activation = Literal["relu2", "swiglu", "geglu"]


@dataclasses.dataclass(unsafe_hash=True)
class MlaConfig(Config):
  """Widths of multi-head latent attention (2405.04434), as in DeepSeek, Youtu-LLM and LongCat.

  Attributes:
    query_lora: width that queries pass through; None projects them directly.
    kv_lora: width of the latent that keys and values come from.
    nope_dim, rope_dim: channels of a head's query and key without and with rotary embedding; the
      rotated ones of the key are shared by all heads.
    value_dim: channels of a head's value.
    interleaved: the rotary embedding turns neighbouring channels; else those half a width apart.
    norm_eps: added to the mean square in the norms of the two narrow vectors.
    align_variance: multiply queries by sqrt(d_model / query_lora) and the latent by
      sqrt(d_model / kv_lora), as LongCat-Flash does (2509.01322).
  """

  query_lora: PositiveInt | None = 1536
  kv_lora: PositiveInt = 512
  nope_dim: PositiveInt = 128
  rope_dim: int = 64
  value_dim: PositiveInt = 128
  interleaved: bool = True
  norm_eps: PositiveFloat = 1e-6
  align_variance: bool = False

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(self.rope_dim >= 2 and self.rope_dim % 2 == 0, "rope_dim", "even and at least 2")


@dataclasses.dataclass(unsafe_hash=True)
class Gemma4Config(Config):
  """Further settings of a Gemma 4 text model; the defaults are those of E2B.

  ``num_kv_heads``, ``head_dim`` and ``rope_theta`` of ``ModelConfig`` are of local layers.

  Attributes:
    window: tokens that a local layer sees, the current one included.
    global_kv_heads, global_head_dim, global_rope_theta: of global layers.
    global_rope_fraction: share of the channel pairs of a global head that are rotated.
    global_key_is_value: global layers have no projection of values: they are the keys before norm
      and rotary embedding.
    per_layer_width: width of the extra input of every layer; 0 is none.
    readers_double_mlp: layers that read another's keys and values have an MLP twice as wide.
    logit_softcap: c in ``c tanh(logits / c)``; None leaves logits as they are.
  """

  window: PositiveInt = 512
  global_kv_heads: PositiveInt = 1
  global_head_dim: int = 512
  global_rope_theta: Annotated[float, Range(1, above=True)] = 1e6
  global_rope_fraction: Share = 0.25
  global_key_is_value: bool = False
  per_layer_width: NonNegativeInt = 256
  readers_double_mlp: bool = True
  logit_softcap: PositiveFloat | None = 30.0

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.global_head_dim >= 2 and self.global_head_dim % 2 == 0,
      "global_head_dim",
      "even and at least 2",
    )


@dataclasses.dataclass(unsafe_hash=True)
class MtpConfig(Config):
  """Multi-token prediction: a small layer that predicts further tokens (2412.19437, 2512.20856).

  Attributes:
    depths: tokens predicted beyond the next one.
    pattern: residual blocks of the layer, one character each.
    shared: apply one layer's weights at every depth, as Nemotron 3 does; else each has a layer
      of its own, as in DeepSeek-V3.
    detach: stop gradients at the model's hidden states, embedding and output projection, so that
      the loss only trains the layer, as in Nemotron 3's reinforcement learning.
  """

  depths: PositiveInt = 1
  pattern: str = "*E"
  shared: bool = True
  detach: bool = False

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    kinds = {k: v for k, v in KINDS.items() if k in BUILT_IN and k not in "V" + GEMMA_KINDS}
    require(
      bool(self.pattern) and set(self.pattern) <= set(kinds),
      "pattern",
      "a non-empty string of " + ", ".join(f"{k!r} ({v})" for k, v in kinds.items()),
    )


@dataclasses.dataclass(unsafe_hash=True)
class LoopConfig(Config):
  """A core of the pattern that runs several times, as in Parcae (2604.12946).

  Attributes:
    prelude, coda: numbers of blocks of the pattern before and after the core.
    mean_depth: mean of the sampled number of iterations.
    eval_depth: iterations in scoring, evaluation and decoding; None is the mean.
    gradient_depth: last iterations of a sequence that gradients go through; None is half the mean,
      rounded up.
    start: state before the first iteration. "normal" draws every token's from a normal of the
      embedding's standard deviation, cut at three of them, as Parcae does.
    start_by: what the draw is addressed by in scoring and sampling, so that both draw the same;
      ours, Parcae's code draws anew in every call. "sequence": the ids of the sequence up to the
      token, so that sequences differ from the first id on in which they differ. Slots then keep a
      hash of their ids. "place": the place of the token, the same for all sequences.
    start_seed: of that draw. Supervised training adds a number that each sequence draws in each
      update, so that no two sequences and no two updates start alike, as in Parcae.
  """

  prelude: NonNegativeInt = 2
  coda: NonNegativeInt = 2
  mean_depth: PositiveInt = 8
  eval_depth: PositiveInt | None = None
  gradient_depth: PositiveInt | None = None
  start: Literal["normal", "zeros"] = "normal"
  start_by: Literal["sequence", "place"] = "sequence"
  start_seed: NonNegativeInt = 0

  @property
  def fixed_depth(self) -> int:
    """Iterations if none are given."""
    return self.mean_depth if self.eval_depth is None else self.eval_depth


@dataclasses.dataclass(unsafe_hash=True)
class SecondPassConfig(Config):
  """The whole stack twice with the same weights, as in the IQuest-Coder-V1 report's LoopCoder.

  Attributes:
    window: tokens back, itself included, that the local attention of the second pass sees; 64 is
      what the released checkpoints are read with.
  """

  window: PositiveInt = 64


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig(Config):
  """A stack of pre-norm residual blocks, one character of ``pattern`` each.

  ``M`` Mamba-2, ``*`` attention, ``-`` MLP, ``E`` mixture of experts, as in Nemotron-H
  (2504.03624); a Llama or Qwen layer is ``*-``, one with latent attention ``A-``, every
  second one of Parcae ``V-``. ``S`` is a whole layer of LongCat-Flash; a Gemma 4 model consists of
  ``lgLGrRxX`` (see ``KINDS``). The defaults are a small hybrid of ours that trains on a CPU.

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
    remat: "block" recomputes each block in the backward pass and keeps only the residual stream;
      "dots" keeps the results of dense projections (``linear.linear``) as well.
    unrolled_blocks: a unit of the pattern with its repeats is a straight-line program if these are
      at most this many blocks and nothing is recomputed (``remat``), else a scan over the repeats,
      which compiles sooner. On CPU the scan costs 1.2 times as much: what the backward pass needs
      is copied into stacks.
    logits_chunk: time steps whose logits are held at once while scoring.
    kernels: implementation of the state space and convolution kernels; None picks the fastest.
      "pallas_tpu" and "pallas_gpu" are also the kernel that reads keys and values in pages, where
      ``paged.fits``, and "pallas_gpu" the flash kernel of attention in training, where
      ``flash.fits``. With "pallas_tpu" latents are kept in a multiple of 128 numbers a token.
    num_heads, num_kv_heads, head_dim: query heads, shared key/value heads, width of each.
    rope_theta: base of the rotary embedding (2104.09864, half-split layout); None is no position
      embedding, as in Nemotron-H.
    rope_scaling_factor: factor by which the slow pairs of the rotary embedding are slowed down, as
      in Llama 3.1 (2407.21783; 8 there, 32 in Llama 3.2); None is no scaling.
    rope_low_freq_factor, rope_high_freq_factor: pairs that turn fewer times than the first over
      ``rope_original_length`` tokens are slow, those that turn more than the second stay as they
      were; 1, 4 and 8,192 in Llama 3.1.
    rope_original_length: see there.
    qk_norm: RMSNorm on each query and key head.
    attention_bias: add a bias to queries, keys and values.
    attention_block: queries of one attention product in training; later keys are left out of it.
    record_max_scores: report the largest score of every attention head in training, which QK-clip
      needs (2507.20534).
    mla: widths of latent attention, of ``A`` and ``S`` blocks, which also use ``num_heads`` and
      ``rope_theta``.
    gemma: settings of Gemma 4 layers; None without them.
    d_mlp: hidden width of ``-`` blocks, and of the MLPs inside ``S`` and Gemma 4 layers.
    mlp_activation: of ``-`` and ``E`` blocks: "relu2" is ``down relu(up x)²``, "swiglu" is
      ``down (silu(gate x) * up x)``, "geglu" has GELU (tanh) in its place.
    mamba_heads, mamba_head_dim, mamba_state, mamba_groups: H, P, N, G of Mamba-2.
    conv_kernel: taps K of the causal convolution.
    chunk_size: tokens a chunk of the state space scan.
    dt_min, dt_max, dt_floor: steps start log-uniform in [dt_min, dt_max], at least dt_floor.
    dt_limit_low, dt_limit_high: clamp of the step after softplus; None is no upper clamp.
    num_experts, experts_per_token: routed experts E and how many of them each token visits.
    d_expert: hidden width of one routed expert.
    d_shared_expert: hidden width of the expert every token visits; 0 leaves it out.
    latent_size: width that routed experts read and write, between two projections from and to
      d_model (LatentMoE, 2512.20856); router and shared expert keep the full width. 0 is none.
    router_scores: scores of a token, from its logits: "sigmoid" (DeepSeek-V3, Nemotron 3) or
      "softmax" over all experts (Qwen3-MoE, LongCat-Flash).
    num_expert_groups, expert_groups_per_token: experts form equal groups in order; a token only
      chooses among those of its best groups, a group's score being the sum of its two largest
      biased scores (2412.19437).
    routed_scaling: factor on the routed sum.
    norm_topk: divide the chosen gates by their sum.
    expert_scale: a learned factor on the gates of each expert, as in Gemma 4.
    zero_experts: experts after the routed ones that return their input (2509.01322).
    frozen_router: no gradient reaches the router's weights; its bias may move.
    router_bias_rule: how ``update_router_bias`` balances: by the "sign" of the gap in load
      (2408.15664), or in proportion to it ("proportional", 2509.01322).
    active_experts: routed experts K_e that "proportional" aims at per token, the remaining choices
      being zero experts; 8 of 12 in LongCat-Flash. None is experts_per_token.
    expert_block: rows of one expert product where tokens are sorted by expert; ours.
    mtp: multi-token prediction; None is without.
    loop: a looped core; None runs every block once.
    second_pass: a second pass over the whole stack; None is one pass.
    expert_capacity: most rows that a device sends to another, as a multiple of their number at
      balance; further rows are dropped. None sends all. Without an ``expert`` mesh axis nothing is
      dropped.
    exact_chunk: tokens a chunk C on which sampling, scoring and training run one and the same
      computation, so that their log-probs are the same bits (``models.exact``); 0 is off. A token
      drawn runs up to C tokens; training runs rows of C tokens one after the other.
  """

  vocab_size: PositiveInt = 264
  d_model: PositiveInt = 128
  pattern: str = "M*-M*-"
  norm_eps: PositiveFloat = 1e-5
  tie_embeddings: bool = False
  compute_dtype: Literal["float32", "bfloat16"] = "float32"
  param_dtype: Literal["float32", "bfloat16"] = "float32"
  init_scale: PositiveFloat = 1.0
  remat: Literal["none", "block", "dots"] = "none"
  unrolled_blocks: PositiveInt = 16
  logits_chunk: PositiveInt = 256
  kernels: Literal["reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None

  num_heads: PositiveInt = 4
  num_kv_heads: PositiveInt = 2
  head_dim: PositiveInt = 32
  rope_theta: float | None = None
  rope_scaling_factor: float | None = None
  rope_low_freq_factor: float = 1.0
  rope_high_freq_factor: float = 4.0
  rope_original_length: PositiveInt = 8192
  qk_norm: bool = False
  attention_bias: bool = False
  attention_block: PositiveInt = 64
  record_max_scores: bool = False

  mla: MlaConfig | None = None
  gemma: Gemma4Config | None = None

  d_mlp: PositiveInt = 512
  mlp_activation: Activation = "relu2"

  mamba_heads: PositiveInt = 8
  mamba_head_dim: PositiveInt = 32
  mamba_state: PositiveInt = 32
  mamba_groups: PositiveInt = 1
  conv_kernel: AtLeastTwo = 4
  chunk_size: PositiveInt = 32
  dt_min: float = 1e-3
  dt_max: float = 1e-1
  dt_floor: PositiveFloat = 1e-4
  dt_limit_low: float = 0.0
  dt_limit_high: float | None = None

  num_experts: PositiveInt = 8
  experts_per_token: PositiveInt = 2
  d_expert: PositiveInt = 128
  d_shared_expert: NonNegativeInt = 128
  latent_size: NonNegativeInt = 0
  router_scores: Literal["sigmoid", "softmax"] = "sigmoid"
  num_expert_groups: int = 1
  expert_groups_per_token: int = 1
  routed_scaling: PositiveFloat = 1.0
  norm_topk: bool = True
  expert_scale: bool = False
  zero_experts: NonNegativeInt = 0
  frozen_router: bool = False
  router_bias_rule: Literal["sign", "proportional"] = "sign"
  active_experts: float | None = None
  expert_block: PositiveInt = 128

  mtp: MtpConfig | None = None
  loop: LoopConfig | None = None
  second_pass: SecondPassConfig | None = None
  expert_capacity: PositiveFloat | None = None
  exact_chunk: NonNegativeInt = 0

  @classmethod
  def from_name(cls, name: str, path: str) -> Self:
    """A fresh copy of "default", a published architecture, or one by entry point or module."""
    from agentjax.models.presets import named_model  # it imports this module

    return cls() if name == "default" else named_model(name, path)  # type: ignore[return-value]

  @property
  def sections(self) -> tuple[str, ...]:
    """Stretches of the pattern that run as a whole: prelude, core and coda of a looped model."""
    if self.loop is None:
      return (self.pattern,)
    core, coda = self.loop.prelude, len(self.pattern) - self.loop.coda
    return self.pattern[:core], self.pattern[core:coda], self.pattern[coda:]

  def check_sight(self) -> None:
    """Raises ValueError if tokens of this model cannot be told what they see (``Sight``)."""
    blind = sorted(set(self.pattern) - set(SIGHTED_KINDS))
    names = ("loop", "second_pass", "exact_chunk", "record_max_scores")
    if blind or any(getattr(self, name) for name in names):
      raise ValueError(
        f"model.pattern={self.pattern!r}; what tokens see can be chosen in blocks of "
        f"{SIGHTED_KINDS!r} alone, with none of {', '.join(names)}."
      )

  @property
  def residual_scale(self) -> float:
    """Scale of each block's initial output, so that the stream's variance stays O(1)."""
    return len(self.pattern) ** -0.5

  @property
  def logit_softcap(self) -> float | None:
    """See ``Gemma4Config.logit_softcap``; None in other models."""
    return None if self.gemma is None else self.gemma.logit_softcap

  @property
  def dtype(self) -> jnp.dtype:
    """Compute dtype as jax knows it."""
    return jnp.dtype(self.compute_dtype)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      bool(self.pattern) and set(self.pattern) <= set(KINDS),
      "pattern",
      "a non-empty string of "
      + ", ".join(f"{k!r} ({v})" for k, v in KINDS.items())
      + "; a block of your own after models.register_block: import the module that calls it",
    )
    ahead = "" if self.mtp is None else self.mtp.pattern
    shares_heads = bool(set("*V" + GEMMA_KINDS) & set(self.pattern + ahead))
    require(
      not shares_heads or self.num_heads % self.num_kv_heads == 0,
      "num_kv_heads",
      f"a divisor of num_heads={self.num_heads}",
    )
    require(
      self.rope_theta is None or (self.rope_theta > 1 and self.head_dim % 2 == 0),
      "rope_theta",
      f"None, or above 1 with an even head_dim (head_dim={self.head_dim})",
    )
    require(
      self.rope_scaling_factor is None
      or (self.rope_scaling_factor >= 1 and self.rope_theta is not None),
      "rope_scaling_factor",
      f"None, or at least 1 with a rope_theta (rope_theta={self.rope_theta})",
    )
    require(
      0 < self.rope_low_freq_factor < self.rope_high_freq_factor,
      "rope_low_freq_factor",
      f"above 0 and below rope_high_freq_factor={self.rope_high_freq_factor}",
    )
    latent = bool(set("AS") & set(self.pattern + ahead))
    require(
      not latent or (self.mla is not None and self.rope_theta is not None),
      "mla",
      "an MlaConfig where pattern has 'A' or 'S', and there with a "
      f"rope_theta (rope_theta={self.rope_theta})",
    )
    self._check_gemma(path)
    self._check_loops(path)
    require(
      self.mamba_heads % self.mamba_groups == 0,
      "mamba_groups",
      f"a divisor of mamba_heads={self.mamba_heads}",
    )
    require(0 < self.dt_min <= self.dt_max, "dt_min", f"above 0 and at most dt_max={self.dt_max}")
    high = float("inf") if self.dt_limit_high is None else self.dt_limit_high
    require(
      0 <= self.dt_limit_low < high,
      "dt_limit_low",
      f"from 0 to below dt_limit_high={self.dt_limit_high}",
    )
    self._check_experts(path)
    self._check_exact(path)

  def _check_exact(self, path: str) -> None:
    if not self.exact_chunk:
      return
    require = self.requirements(path)
    inexact = sorted(set(self.pattern) - set(EXACT_KINDS))
    require(
      not inexact,
      "exact_chunk",
      f"0 with blocks {', '.join(f'{k!r} ({KINDS[k]})' for k in inexact)}: only "
      f"{', '.join(f'{k!r} ({KINDS[k]})' for k in EXACT_KINDS)} run on its grid",
    )
    for field in ("loop", "second_pass"):
      once = getattr(self, field) is None
      require(once, "exact_chunk", f"0 with {path}.{field}, which runs blocks again")
    require(
      self.kernels in (None, "xla", "reference"),
      "exact_chunk",
      f"0 with {path}.kernels={self.kernels!r}; exact with None, 'xla' or 'reference'",
    )

  def _check_experts(self, path: str) -> None:
    require = self.requirements(path)
    require(
      self.zero_experts == 0 or self.latent_size == 0,
      "zero_experts",
      f"0 with a latent_size ({self.latent_size})",
    )
    groups = self.num_expert_groups
    members = self.num_experts // max(groups, 1)
    require(
      groups == 1
      or (groups > 1 and members * groups == self.num_experts and members > 1)
      and self.zero_experts == 0,
      "num_expert_groups",
      f"1, or without zero_experts ({self.zero_experts}) a divisor of "
      f"num_experts={self.num_experts} that leaves two experts or more in a group",
    )
    require(
      1 <= self.expert_groups_per_token <= groups,
      "expert_groups_per_token",
      f"from 1 to num_expert_groups={groups}",
    )
    reached = members * self.expert_groups_per_token + self.zero_experts
    require(
      self.experts_per_token <= reached,
      "experts_per_token",
      f"at most the {reached} experts that a token can reach (num_experts={self.num_experts})",
    )
    require(
      self.active_experts is None or 0 < self.active_experts <= self.experts_per_token,
      "active_experts",
      f"None, or above 0 and at most experts_per_token={self.experts_per_token}",
    )

  def _check_loops(self, path: str) -> None:
    require = self.requirements(path)
    require(
      self.mtp is None or self.gemma is None,
      "mtp",
      "None with config.gemma, whose embeddings are scaled",
    )
    if self.loop is not None:
      core = self.sections[1]
      # A router would choose again in every iteration, but replay has only one choice.
      require(
        bool(core) and set(core) <= set("*V-MA"),
        "loop.prelude",
        f"with coda={self.loop.coda} what leaves a core of '*', 'V', '-', 'M' and 'A' blocks "
        f"between them (pattern={self.pattern!r}, core={core!r})",
      )
    require(
      self.second_pass is None or (self.loop is None and set(self.pattern) <= set("*-")),
      "second_pass",
      f"None, unless the pattern has '*' and '-' blocks only and config.loop is None "
      f"(pattern={self.pattern!r})",
    )

  def _check_gemma(self, path: str) -> None:
    require = self.requirements(path)
    layers = [kind for kind in self.pattern if kind in GEMMA_KINDS]
    if not layers and self.gemma is None:
      return
    require(
      len(layers) == len(self.pattern) and self.gemma is not None,
      "pattern",
      f"with config.gemma only {', '.join(GEMMA_KINDS)}, and these only with config.gemma",
    )
    require(
      self.rope_theta is not None and self.rope_scaling_factor is None,
      "rope_theta",
      "a number, and config.rope_scaling_factor=None, in Gemma 4 models "
      f"(rope_scaling_factor={self.rope_scaling_factor})",
    )
    assert self.gemma is not None
    for lends, reads in ("Lr", "GR"):
      lent = self.pattern.find(lends)
      read = self.pattern.find(reads)
      require(
        self.pattern.count(lends) <= 1 and (read < 0 or 0 <= lent < read),
        "pattern",
        f"one {lends!r} at most, before every {reads!r}",
      )
    require(
      self.num_heads % self.gemma.global_kv_heads == 0,
      "gemma.global_kv_heads",
      f"a divisor of num_heads={self.num_heads}",
    )
