"""The stack of residual blocks: parameters, training forward, growth of the router bias."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.blocks import KINDS, Rows
from agentjax.models.config import ModelConfig
from agentjax.models.moe import Moe, Routing
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import ParamSpec, Weight, init_params, is_spec
from agentjax.sharding import constrain

Array = jax.Array
Blocks = tuple[Any, ...]  # one entry a character: what the kind's ``spec`` makes


@flax.struct.dataclass
class Params:
  """A whole policy.

  Attributes:
    embedding: [vocab, embed].
    groups: per entry of ``factor_pattern``, what ``BlockKind.spec`` says per character of the
      unit, its arrays stacked over the repeats along a leading axis.
    final_norm: [embed].
    lm_head: [embed, vocab]; None where embeddings are tied.
  """

  embedding: Weight
  groups: tuple[Blocks, ...]
  final_norm: Weight
  lm_head: Weight | None


@flax.struct.dataclass
class DecodeParams:
  """Weights for decoding: one entry a block, in the compute dtype, nothing stacked."""

  embedding: Weight  # [vocab, embed]
  blocks: Blocks
  final_norm: Weight  # [embed]
  lm_head: Weight | None  # [embed, vocab]


@flax.struct.dataclass
class ForwardOutput:
  """Result of ``forward``.

  Attributes:
    hidden: [B, T, embed], after the last norm.
    routing: of all blocks with a router, in pattern order, on a leading axis; None without any.
  """

  hidden: Array
  routing: Routing | None

  @property
  def balance_loss(self) -> Array:
    """Float32 scalar, mean over the blocks with a router; 0 without one."""
    return jnp.zeros(()) if self.routing is None else jnp.mean(self.routing.balance_loss)


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

  def block(kind: str, repeats: int) -> Any:
    spec = KINDS[kind].spec(config)
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
  *,
  experts: Int[Array, "routers batch time choices"] | None = None,
) -> ForwardOutput:
  """Hidden states of packed rows, for training and scoring.

  Args:
    params: as from ``init``.
    config: of the params.
    token_ids: [B, T].
    segment_ids: [B, T], 0 on padding, else the sequence a token belongs to; neither attention, nor
      convolution, nor state reaches across.
    positions: [B, T], place of the token in its sequence.
    experts: expert ids that every block with a router uses in the place of its own choice.
  """
  x = _embed(params, config, token_ids)
  rows = Rows(segment_ids, positions)
  given = given_to_blocks(config, experts)
  routings: list[Routing] = []
  for (unit, repeats), group in zip(factor_pattern(config.pattern), params.groups, strict=True):
    body = functools.partial(_run_unit, unit=unit, config=config, rows=rows)
    here, given = given[: len(unit) * repeats], given[len(unit) * repeats :]
    if repeats == 1:
      x, routed = body(x, (jax.tree.map(lambda w: w[0], group), here))
      routings += routed
    else:
      each = tuple(
        jax.tree.map(lambda *v: jnp.stack(v), *here[i :: len(unit)]) for i in range(len(unit))
      )
      x, routed = jax.lax.scan(body, x, (group, each), unroll=min(config.scan_unroll, repeats))
      routings += [jax.tree.map(lambda v, i=i: v[i], r) for i in range(repeats) for r in routed]
  return ForwardOutput(
    hidden=rms_norm(x, params.final_norm, config.norm_eps),
    routing=jax.tree.map(lambda *v: jnp.stack(v), *routings) if routings else None,
  )


def given_to_blocks(config: ModelConfig, experts: Array | None) -> tuple[Array | None, ...]:
  """What each block of the pattern gets beside the stream (see ``BlockKind``)."""
  remaining = iter(() if experts is None else experts)
  return tuple(next(remaining, None) if KINDS[kind].routes else None for kind in config.pattern)


def update_router_bias(
  params: Params, load: Float[Array, "routers experts"], rate: float | Array
) -> Params:
  """Balances experts without a loss: ``bias_e += rate * sign(mean load - load_e)``.

  Args:
    params: as from ``init``.
    load: tokens of the whole batch sent to each expert, per block with a router in pattern order.
    rate: 1e-3 in Nemotron 3 and DeepSeek-V3; 0 leaves the bias as it is.

  References: Wang et al., 2408.15664.
  """
  change = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
  groups, used = [], 0
  for group in params.groups:
    routers = [leaf for leaf in jax.tree.leaves(group, is_leaf=_is_moe) if _is_moe(leaf)]
    if not routers:
      groups.append(group)
      continue
    repeats = routers[0].router_bias.shape[0]
    here = change[used : used + repeats * len(routers)].reshape(repeats, len(routers), -1)
    used += repeats * len(routers)
    steps = iter(jnp.moveaxis(here, 1, 0))

    def move(leaf: Any, steps: Any = steps) -> Any:
      if not _is_moe(leaf):
        return leaf
      return dataclasses.replace(leaf, router_bias=leaf.router_bias + next(steps))

    groups.append(jax.tree.map(move, group, is_leaf=_is_moe))
  return dataclasses.replace(params, groups=tuple(groups))


def unstack(groups: tuple[Blocks, ...], config: ModelConfig) -> list[Any]:
  """One block per character of the pattern, in order, of ``Params.groups``."""
  blocks: list[Any] = []
  for (_, repeats), group in zip(factor_pattern(config.pattern), groups, strict=True):
    for i in range(repeats):
      blocks += [jax.tree.map(lambda w, i=i: w[i], block) for block in group]
  return blocks


def _is_moe(node: Any) -> bool:
  return isinstance(node, Moe)


def _embed(params: Params, config: ModelConfig, token_ids: Array) -> Array:
  x = params.embedding[token_ids].astype(config.dtype)
  return constrain(x, ("batch", "time", "stream"), name="the residual stream")


def _run_unit(
  x: Array,
  blocks_and_given: tuple[Blocks, tuple[Array | None, ...]],
  *,
  unit: str,
  config: ModelConfig,
  rows: Rows,
) -> tuple[Array, list[Routing]]:
  """Applies the blocks of one unit; the routings are those of its blocks with a router."""

  def run(x: Array, block: Any, given: Array | None, kind: str) -> tuple[Array, Routing | None]:
    x, routing = KINDS[kind].forward(block, x, config, rows, given)
    return constrain(x, ("batch", "time", "stream"), name="the residual stream"), routing

  if config.remat == "block":
    run = jax.checkpoint(run, static_argnums=3)
  routings = []
  for kind, block, given in zip(unit, *blocks_and_given, strict=True):
    x, routing = run(x, block, given, kind)
    if routing is not None:
      routings.append(routing)
  return x, routings
