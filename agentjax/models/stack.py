"""The stack of residual blocks: parameters, training forward, growth of the router bias."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.attention import Attention, attention, attention_spec
from agentjax.models.config import ModelConfig
from agentjax.models.mamba2 import Mamba2, mamba2, mamba2_spec
from agentjax.models.mlp import Mlp, mlp, mlp_spec
from agentjax.models.moe import Moe, RouterStats, moe, moe_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import ParamSpec, Weight, init_params, is_spec

Array = jax.Array
Mixer = Mamba2 | Attention | Mlp | Moe


@flax.struct.dataclass
class Block:
  """``x + mixer(norm x)``."""

  norm: Weight  # [embed]
  mixer: Mixer


@flax.struct.dataclass
class Params:
  """A whole policy.

  Attributes:
    embedding: [vocab, embed].
    groups: per entry of ``factor_pattern``, one Block per character of the unit, its arrays stacked
      over the repeats along a leading axis.
    final_norm: [embed].
    lm_head: [embed, vocab]; None where embeddings are tied.
  """

  embedding: Weight
  groups: tuple[tuple[Block, ...], ...]
  final_norm: Weight
  lm_head: Weight | None


@flax.struct.dataclass
class DecodeParams:
  """Weights for decoding: one entry a block, in the compute dtype, nothing stacked."""

  embedding: Weight  # [vocab, embed]
  blocks: tuple[Block, ...]
  final_norm: Weight  # [embed]
  lm_head: Weight | None  # [embed, vocab]


@flax.struct.dataclass
class ForwardOutput:
  """Result of ``forward``.

  Attributes:
    hidden: [B, T, embed], after the last norm.
    router_load: float32 [mixture blocks, experts], tokens sent to each expert, padding left out.
    balance_loss: float32 scalar, mean over mixture blocks; 0 without one. See ``RouterStats``.
  """

  hidden: Array
  router_load: Array
  balance_loss: Array


@functools.lru_cache(maxsize=256)
def factor_pattern(pattern: str) -> tuple[tuple[str, int], ...]:
  """Splits a pattern into repeated units, with as few blocks to compile as possible.

  ``"M*-M*-M"`` gives ``(("M*-", 2), ("M", 1))``. Among splits that compile equally many blocks the
  one with the fewest groups wins, then the one with the longest first group.
  """
  best: list[tuple[int, int, tuple[tuple[str, int], ...]]] = [(0, 0, ())]
  # best[n] is the cheapest split of the last n characters.
  for size in range(1, len(pattern) + 1):
    rest = pattern[len(pattern) - size :]
    found = None
    for width in range(size, 0, -1):
      unit, repeats = rest[:width], 1
      while rest.startswith(unit, repeats * width):
        repeats += 1
      for times in range(repeats, 0, -1):
        blocks, groups, tail = best[size - times * width]
        option = (width + blocks, 1 + groups, ((unit, times), *tail))
        if found is None or option[:2] < found[:2]:
          found = option
    assert found is not None
    best.append(found)
  return best[-1][2]


def param_specs(config: ModelConfig) -> Params:
  """The whole model as ``ParamSpec``s."""

  def block(kind: str, repeats: int) -> Block:
    spec = Block(norm=norm_spec(config.d_model, config), mixer=_mixer_spec(kind, config))
    return jax.tree.map(lambda s: s.stacked(repeats), spec, is_leaf=is_spec)

  table = ParamSpec(
    (config.vocab_size, config.d_model),
    ("vocab", "embed"),
    config.param_dtype,
    scale=config.init_scale * config.d_model**-0.5,
  )
  head = dataclasses.replace(table, shape=table.shape[::-1], axes=table.axes[::-1])
  return Params(
    embedding=table,
    groups=tuple(
      tuple(block(kind, repeats) for kind in unit)
      for unit, repeats in factor_pattern(config.pattern)
    ),
    final_norm=norm_spec(config.d_model, config),
    lm_head=None if config.tie_embeddings else head,
  )


def init(config: ModelConfig, key: Array) -> Params:
  """Draws the parameters; each array's key is folded from its path."""
  return init_params(param_specs(config), key)


def forward(
  params: Params,
  config: ModelConfig,
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
) -> ForwardOutput:
  """Hidden states of packed rows, for training and scoring.

  Args:
    params: as from ``init``.
    config: of the params.
    token_ids: [B, T].
    segment_ids: [B, T], 0 on padding, else the sequence a token belongs to; neither attention, nor
      convolution, nor state reaches across.
    positions: [B, T], place of the token in its sequence.
  """
  x = params.embedding[token_ids].astype(config.dtype)
  run = functools.partial(_run_unit, config=config, segment_ids=segment_ids, positions=positions)
  stats: list[RouterStats] = []
  for (unit, repeats), group in zip(factor_pattern(config.pattern), params.groups, strict=True):
    body = functools.partial(run, unit=unit)
    if repeats == 1:
      x, routed = body(x, jax.tree.map(lambda w: w[0], group))
      routed = jax.tree.map(lambda s: s[None], routed)
    else:
      x, routed = jax.lax.scan(body, x, group, unroll=min(config.scan_unroll, repeats))
    stats += [jax.tree.map(lambda s, i=i: s[i], one) for i in range(repeats) for one in routed]
  hidden = rms_norm(x, params.final_norm, config.norm_eps)
  if not stats:
    return ForwardOutput(
      hidden=hidden,
      router_load=jnp.zeros((0, config.num_experts), jnp.float32),
      balance_loss=jnp.zeros((), jnp.float32),
    )
  return ForwardOutput(
    hidden=hidden,
    router_load=jnp.stack([s.load for s in stats]),
    balance_loss=jnp.mean(jnp.stack([s.balance_loss for s in stats])),
  )


def update_router_bias(
  params: Params, router_load: Float[Array, "blocks experts"], rate: float | Array
) -> Params:
  """Balances experts without a loss: ``bias_e += rate * sign(mean load - load_e)``.

  Args:
    params: as from ``init``.
    router_load: tokens of the whole batch sent to each expert, per mixture block in pattern order.
    rate: 1e-3 in Nemotron 3 and DeepSeek-V3; 0 leaves the bias as it is.

  References: Wang et al., 2408.15664.
  """
  mean = jnp.mean(router_load, axis=-1, keepdims=True)
  change = rate * jnp.sign(mean - router_load)
  groups, used = [], 0
  for group in params.groups:
    mixtures = [i for i, block in enumerate(group) if isinstance(block.mixer, Moe)]
    repeats = group[0].norm.shape[0]
    here = change[used : used + repeats * len(mixtures)].reshape(repeats, len(mixtures), -1)
    used += repeats * len(mixtures)
    blocks = list(group)
    for index, i in enumerate(mixtures):
      mixer = blocks[i].mixer
      assert isinstance(mixer, Moe)
      bias = mixer.router_bias + here[:, index]
      blocks[i] = dataclasses.replace(blocks[i], mixer=dataclasses.replace(mixer, router_bias=bias))
    groups.append(tuple(blocks))
  return dataclasses.replace(params, groups=tuple(groups))


def unstack(params: Params, config: ModelConfig) -> list[Block]:
  """One Block per character of the pattern, in order."""
  blocks: list[Block] = []
  for (_, repeats), group in zip(factor_pattern(config.pattern), params.groups, strict=True):
    for i in range(repeats):
      blocks += [jax.tree.map(lambda w, i=i: w[i], block) for block in group]
  return blocks


def _mixer_spec(kind: str, config: ModelConfig) -> Mixer:
  match kind:
    case "M":
      return mamba2_spec(config)
    case "*":
      return attention_spec(config)
    case "-":
      return mlp_spec(config, config.d_mlp)
    case "E":
      return moe_spec(config)
  raise ValueError(f"pattern has {kind!r}; allowed: M, *, -, E.")


def _run_unit(
  x: Array,
  blocks: tuple[Block, ...],
  *,
  unit: str,
  config: ModelConfig,
  segment_ids: Array,
  positions: Array,
) -> tuple[Array, tuple[RouterStats, ...]]:
  """Applies the blocks of one unit; the statistics are those of its mixture blocks."""
  run: Callable[..., tuple[Array, RouterStats | None]] = functools.partial(
    _run_block, config=config, segment_ids=segment_ids, positions=positions
  )
  if config.remat == "block":
    run = jax.checkpoint(run)
  stats = []
  for _, block in zip(unit, blocks, strict=True):
    x, routed = run(x, block)
    if routed is not None:
      stats.append(routed)
  return x, tuple(stats)


def _run_block(
  x: Array, block: Block, *, config: ModelConfig, segment_ids: Array, positions: Array
) -> tuple[Array, RouterStats | None]:
  inputs = rms_norm(x, block.norm, config.norm_eps)
  stats = None
  match block.mixer:
    case Mamba2() as mixer:
      out = mamba2(mixer, inputs, config, segment_ids=segment_ids)
    case Attention() as mixer:
      out = attention(mixer, inputs, config, segment_ids=segment_ids, positions=positions)
    case Mlp() as mixer:
      out = mlp(mixer, inputs)
    case Moe() as mixer:
      out, stats = moe(mixer, inputs, config, real=segment_ids != 0)
  return x + out, stats
