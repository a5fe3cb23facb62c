"""The stack of residual blocks: parameters, training forward, growth of the router bias."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.config import check
from agentjax.models.attend import Sight
from agentjax.models.blocks import KINDS, BlockKind, BlockReport, Rows, StreamKind
from agentjax.models.config import ModelConfig, MtpConfig
from agentjax.models.linear import LINEAR
from agentjax.models.matrices import matrix_spec
from agentjax.models.moe import Moe, Routing, bias_change
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.passes import Section, pass_kind
from agentjax.models.spec import ParamSpec, Weight, init_params, is_spec
from agentjax.sharding import LOGICAL_AXES, constrain, index, on_shards, ways

Array = jax.Array
Blocks = tuple[Any, ...]  # one entry a character: what the kind's ``spec`` makes

# Results of a block that ``config.remat`` keeps for its gradient: none, or its dense projections.
_KEPT = {"block": None, "dots": jax.checkpoint_policies.save_only_these_names(LINEAR)}


@flax.struct.dataclass
class MtpLayer:
  """The layer of multi-token prediction; every array has a leading axis, of size 1 if depths share
  weights.

  Attributes:
    token_norm, hidden_norm: [embed], of the embedding and of the hidden state.
    join: [2 * embed, embed], of the normed embedding and hidden state one after the other.
    blocks: parameters of ``BlockKind.spec`` for each character of ``config.mtp.pattern``.
    final_norm: [embed], before the output projection and the next depth.
  """

  token_norm: Weight
  hidden_norm: Weight
  join: Weight
  blocks: Blocks
  final_norm: Weight


@flax.struct.dataclass
class Params:
  """A whole policy.

  Attributes:
    embedding: [vocab, embed].
    groups: for each entry of ``pattern_units``, the parameters of ``BlockKind.spec`` for each
      character of the unit, stacked over the repeats along a leading axis.
    final_norm: [embed].
    lm_head: [embed, vocab]; None where embeddings are tied.
    mtp: None without ``config.mtp``.
    loop, second_pass: parameters of ``PassKind.spec``; None without ``config.loop`` and
      ``config.second_pass``.
    per_layer: parameters of ``StreamKind.spec``; None without.
  """

  embedding: Weight
  groups: tuple[Blocks, ...]
  final_norm: Weight
  lm_head: Weight | None
  mtp: MtpLayer | None = None
  loop: Any = None
  second_pass: Any = None
  per_layer: Any = None


@flax.struct.dataclass
class DecodeParams:
  """Weights for decoding: one entry a block, in the compute dtype, nothing stacked."""

  embedding: Weight  # [vocab, embed]
  blocks: Blocks
  final_norm: Weight  # [embed]
  lm_head: Weight | None  # [embed, vocab]
  loop: Any = None
  second_pass: Any = None
  per_layer: Any = None
  mtp: tuple[MtpLayer, ...] | None = None  # one a layer, for drafts


@flax.struct.dataclass
class ForwardOutput:
  """Result of ``forward``.

  Attributes:
    hidden: [B, T, embed], after the last norm.
    routing: of all blocks with a router, in pattern order, on a leading axis; None without any.
    max_scores: float32 [attentions, heads], the largest score of every attention head on these rows
      in pattern order (see ``attend.max_scores``); None unless ``config.record_max_scores``.
    captured: [blocks, B, K, embed], the stream after every block at the places that were asked for,
      without the last norm; None if none were asked for.
  """

  hidden: Array
  routing: Routing | None
  max_scores: Array | None
  captured: Array | None

  @property
  def balance_loss(self) -> Array:
    """Float32 scalar, mean over the blocks with a router; 0 without one."""
    return self._over_routers("balance_loss", jnp.mean)

  @property
  def sequence_balance_loss(self) -> Array:
    """Likewise, balance within each sequence."""
    return self._over_routers("sequence_balance_loss", jnp.mean)

  @property
  def router_z_loss(self) -> Array:
    """Likewise, mean of ``logsumexp(logits)²``."""
    return self._over_routers("router_z_loss", jnp.mean)

  @property
  def dropped(self) -> Array:
    """Float32 scalar, choices of all blocks that were dropped for lack of room."""
    return self._over_routers("dropped", jnp.sum)

  def _over_routers(self, name: str, reduce: Callable[[Array], Array]) -> Array:
    return jnp.zeros(()) if self.routing is None else reduce(getattr(self.routing, name))


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


def pattern_units(config: ModelConfig) -> tuple[tuple[str, int], ...]:
  """``factor_pattern`` of every section: no unit spans the border of a looped core."""
  return tuple(unit for section in config.sections for unit in factor_pattern(section))


def param_specs(config: ModelConfig) -> Params:
  """The whole model as ``ParamSpec``s."""

  def block(kind: str, repeats: int) -> Any:
    return _stacked(KINDS[kind].spec(config), repeats)

  table = ParamSpec(
    (config.vocab_size, config.d_model),
    ("vocab", "embed"),
    config.param_dtype,
    scale=config.init_scale * config.d_model**-0.5,
  )
  head = dataclasses.replace(table, shape=table.shape[::-1], axes=table.axes[::-1])
  stream, passes = stream_kind(config), pass_kind(config)
  return Params(
    embedding=table,
    groups=tuple(
      tuple(block(kind, repeats) for kind in unit) for unit, repeats in pattern_units(config)
    ),
    final_norm=norm_spec(config.d_model, config),
    lm_head=None if config.tie_embeddings else head,
    mtp=None if config.mtp is None else _mtp_spec(config, config.mtp),
    **({} if passes is None else {passes.field: passes.spec(config)}),
    per_layer=None if stream is None else stream.spec(config),
  )


def _mtp_spec(config: ModelConfig, mtp: MtpConfig) -> MtpLayer:
  norm = norm_spec(config.d_model, config)
  layer = MtpLayer(
    token_norm=norm,
    hidden_norm=norm,
    join=matrix_spec(config, (2 * config.d_model, config.d_model), ("embed", None)),
    blocks=tuple(KINDS[kind].spec(config) for kind in mtp.pattern),
    final_norm=norm,
  )
  return _stacked(layer, 1 if mtp.shared else mtp.depths)


def _stacked(specs: Any, repeats: int) -> Any:
  return jax.tree.map(lambda s: s.stacked(repeats), specs, is_leaf=is_spec)


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
  drawn: Any = None,
  anchors: Float[Array, "blocks batch time embed"] | None = None,
  captured: Int[Array, "batch places"] | None = None,
  sight: Sight | None = None,
  embedded: Float[Array, "batch time embed"] | None = None,
  kinds: Mapping[str, BlockKind] = KINDS,
) -> ForwardOutput:
  """Hidden states of packed rows, for training and scoring.

  Args:
    params: as from ``init``.
    config: of the params.
    token_ids: [B, T].
    segment_ids: [B, T], 0 on padding, else the sequence a token belongs to; neither attention, nor
      convolution, nor state reaches across.
    positions: [B, T], place of the token in its sequence.
    experts: expert ids that replace the choice of every router.
    drawn: what ``PassKind.draw`` gives: of a looped core its iterations and where its states start.
      None is what scoring and sampling take.
    anchors: the stream after every block from another computation of the same function. It replaces
      the block's own result and gets its gradient (see ``anchored``).
    captured: places in their rows at which the stream after every block is wanted.
    sight: what tokens see; None is themselves and those before them.
    embedded: takes the place of the embeddings of ``token_ids``.
    kinds: what each character of the pattern runs; parameters are those of ``KINDS``.

  Raises:
    ValueError: drawn for a model without a looped core; captured or kinds for one whose blocks run
      more than once; sight for one of which ``config.check_sight`` says so.
  """
  passes = pass_kind(config)
  if passes is not None and (captured is not None or kinds is not KINDS):
    raise ValueError(
      "captured and kinds are of each block once, and blocks of this model run more than once; "
      "allowed: a model without config.loop and config.second_pass."
    )
  if sight is not None:
    config.check_sight()
  if drawn is not None and (passes is None or passes.draw is None):
    raise ValueError("drawn was given, but nothing loops: set config.loop, or leave it out.")
  x, per_layer = open_stream(params, config, token_ids, embedded)
  x = _pin(x, config)
  rows = Rows(segment_ids, positions, captured, sight)
  given = given_to_blocks(config, experts, per_layer, token_ids)
  if anchors is not None:
    given = tuple(_Given(*pair) for pair in zip(given, anchors, strict=True))
  sections = _sections(params.groups, given, config)
  run = functools.partial(_run_section, config=config, rows=rows)
  if passes is None:
    x, reports = run(x, sections[0], kinds=kinds)
  else:
    own = getattr(params, passes.field)
    x, reports = passes.forward(own, x, token_ids, sections, config, rows, drawn, run)
  routings = [report.routing for report in reports if report.routing is not None]
  scores = [report.max_scores for report in reports if report.max_scores is not None]
  streams = [report.captured for report in reports if report.captured is not None]
  return ForwardOutput(
    hidden=rms_norm(close_stream(x, config), params.final_norm, config.norm_eps),
    routing=jax.tree.map(lambda *v: jnp.stack(v), *routings) if routings else None,
    max_scores=jnp.concatenate(scores) if scores else None,
    captured=jnp.stack(streams) if streams else None,
  )


def num_routers(config: ModelConfig) -> int:
  """Blocks with a router in the pattern."""
  return sum(KINDS[kind].routes for kind in config.pattern)


def stream_kind(config: ModelConfig) -> StreamKind | None:
  """The kind of stream between the blocks; None is an array.

  Raises:
    ConfigError: blocks of the pattern read different kinds of streams.
  """
  kinds = {KINDS[kind].stream for kind in config.pattern}
  check(
    len(kinds) == 1,
    "model.pattern",
    config.pattern,
    "blocks that all read the same stream (BlockKind.stream)",
  )
  return kinds.pop()


def open_stream(
  params: Params | DecodeParams,
  config: ModelConfig,
  token_ids: Int[Array, "*lead"],
  embedded: Float[Array, "*lead embed"] | None = None,
) -> tuple[Any, Array | None]:
  """The stream that the first block reads, and the inputs of all blocks [*lead, blocks, per_layer].

  The stream is [*lead, embed] in the compute dtype, or what ``StreamKind.open`` gives; inputs are
  None in models that have none. ``embedded`` takes the place of the embeddings.
  """
  table, stream = params.embedding.astype(config.dtype), stream_kind(config)
  x = look_up(table, token_ids) if embedded is None else embedded.astype(config.dtype)
  return (x, None) if stream is None else stream.open(x, params.per_layer, config, token_ids)


def look_up(table: Array, token_ids: Array) -> Array:
  """``table[token_ids]``, of a table whose axes are "vocab" and "embed".

  Over a mesh each device looks up its own tokens, except one token a row. Otherwise the compiler
  would sum a gradient of the whole table on every device.
  """
  if token_ids.ndim != 2 or token_ids.shape[1] == 1 or table.shape[0] % ways("vocab"):
    return table[token_ids]

  def part(table: Array, token_ids: Array) -> Array:
    if ways("embed") > 1:
      table = jax.lax.all_gather(table, LOGICAL_AXES["embed"], axis=1, tiled=True)
    if ways("vocab") == 1:
      return table[token_ids]
    own = token_ids - index("vocab") * table.shape[0]
    here = (own >= 0) & (own < table.shape[0])
    found = jnp.where(here[..., None], table[jnp.where(here, own, 0)], 0)
    return jax.lax.psum(found, LOGICAL_AXES["vocab"])

  arguments = [(table, ("vocab", "embed")), (token_ids, ("batch", "time"))]
  return on_shards(part, arguments, ("batch", "time", None), name="the embedding")


def close_stream(x: Any, config: ModelConfig) -> Float[Array, "*lead embed"]:
  """The stream after the last block, before the last norm."""
  stream = stream_kind(config)
  return x if stream is None else stream.close(x)


def given_to_blocks(
  config: ModelConfig,
  experts: Array | None,
  per_layer: Array | None,
  token_ids: Int[Array, "*lead"] | None = None,
) -> tuple[Any, ...]:
  """The further input of each block of the pattern (see ``BlockKind``)."""
  remaining = iter(() if experts is None else experts)
  chosen = (next(remaining, None) if KINDS[kind].routes else None for kind in config.pattern)
  stream = stream_kind(config)
  if stream is None:
    return tuple(
      token_ids if KINDS[kind].reads_tokens else ids
      for kind, ids in zip(config.pattern, chosen, strict=True)
    )
  return tuple(stream.give(per_layer, i, ids) for i, ids in enumerate(chosen))


def update_router_bias(
  params: Params,
  config: ModelConfig,
  load: Float[Array, "routers experts"],
  rate: float | Array,
) -> Params:
  """Balances experts without a loss, by ``config.router_bias_rule`` (see ``moe.bias_change``).

  Args:
    params: as from ``init``.
    config: of the params.
    load: tokens of the whole batch sent to each expert, per block with a router in pattern order,
      and after these, if at all, per router of the multi-token prediction (``MtpLoss.load``).
    rate: 1e-3 in Nemotron 3 and DeepSeek-V3; 0 leaves the bias as it is.
  """
  change = bias_change(load, rate, config)
  used = 0

  def moved(group: Any) -> Any:
    nonlocal used
    routers = [leaf for leaf in jax.tree.leaves(group, is_leaf=_is_moe) if _is_moe(leaf)]
    if not routers:
      return group
    repeats = routers[0].router_bias.shape[0]
    here = change[used : used + repeats * len(routers)].reshape(repeats, len(routers), -1)
    used += repeats * len(routers)
    steps = iter(jnp.moveaxis(here, 1, 0))

    def move(leaf: Any) -> Any:
      if not _is_moe(leaf):
        return leaf
      return dataclasses.replace(leaf, router_bias=leaf.router_bias + next(steps))

    return jax.tree.map(move, group, is_leaf=_is_moe)

  params = dataclasses.replace(params, groups=tuple(moved(group) for group in params.groups))
  return params if used == len(change) else dataclasses.replace(params, mtp=moved(params.mtp))


def unstack(groups: tuple[Blocks, ...], config: ModelConfig) -> list[Any]:
  """One block per character of the pattern, in order, of ``Params.groups``."""
  blocks: list[Any] = []
  for (_, repeats), group in zip(pattern_units(config), groups, strict=True):
    for i in range(repeats):
      blocks += [jax.tree.map(lambda w, i=i: w[i], block) for block in group]
  return blocks


@jax.custom_vjp
def anchored(x: Array, exact: Array) -> Array:
  """The value of ``exact`` with the gradient of x; both are roundings of the same number."""
  del x
  return exact


def _anchored_forward(x: Array, exact: Array) -> tuple[Array, None]:
  return anchored(x, exact), None


def _anchored_backward(kept: None, gradient: Array) -> tuple[Array, Array]:
  del kept
  return gradient, jnp.zeros_like(gradient)


anchored.defvjp(_anchored_forward, _anchored_backward)


class _Given(NamedTuple):
  """The further input of a block (see ``BlockKind``), and the stream after it."""

  own: Any
  anchor: Array  # [B, T, embed]


def _is_moe(node: Any) -> bool:
  return isinstance(node, Moe)


def _pin(x: Any, config: ModelConfig) -> Any:
  """Fixes the sharding of the stream of packed rows."""
  stream = stream_kind(config)
  axes, name = ("batch", "time", "stream"), "the residual stream"
  if stream is None:
    return constrain(x, axes, name=name)
  return stream.replace(x, constrain(stream.close(x), axes, name=name))


def _sections(
  groups: tuple[Blocks, ...], given: tuple[Any, ...], config: ModelConfig
) -> tuple[Section, ...]:
  """Groups and the further inputs of their blocks, by section of the pattern
  (``config.sections``)."""
  sections: list[Section] = []
  rest = iter(groups)
  for pattern in config.sections:
    units = factor_pattern(pattern)
    here = tuple(itertools.islice(rest, len(units)))
    sections.append(Section(units, here, given[: len(pattern)]))
    given = given[len(pattern) :]
  return tuple(sections)


def _run_section(
  x: Array,
  section: Section,
  *,
  config: ModelConfig,
  rows: Rows,
  kinds: Mapping[str, BlockKind] = KINDS,
) -> tuple[Array, list[Any]]:
  """Applies the groups of a section; the reports are those of its blocks, in pattern order."""
  reports: list[Any] = []
  given = section.given
  for (unit, repeats), group in zip(section.units, section.groups, strict=True):
    body = functools.partial(run_unit, unit=unit, config=config, rows=rows, kinds=kinds)
    here, given = given[: len(unit) * repeats], given[len(unit) * repeats :]
    if repeats == 1:
      x, told = body(x, (jax.tree.map(lambda w: w[0], group), here))
      reports += told
    else:
      each = tuple(
        jax.tree.map(lambda *v: jnp.stack(v), *here[i :: len(unit)]) for i in range(len(unit))
      )
      # In a straight-line program XLA:CPU would merge the recomputation with the first computation.
      unroll = config.remat == "none" and len(unit) * repeats <= config.unrolled_blocks
      x, told = jax.lax.scan(body, x, (group, each), unroll=unroll)
      reports += [jax.tree.map(lambda v, i=i: v[i], r) for i in range(repeats) for r in told]
  return x, reports


def run_unit(
  x: Array,
  blocks_and_given: tuple[Blocks, tuple[Array | None, ...]],
  *,
  unit: str,
  config: ModelConfig,
  rows: Rows,
  kinds: Mapping[str, BlockKind] = KINDS,
) -> tuple[Array, list[BlockReport]]:
  """Applies the blocks of one unit, and gathers what each of them reports."""

  def run(x: Array, block: Any, given: Any, kind: str) -> tuple[Array, BlockReport]:
    given, anchor = given if isinstance(given, _Given) else (given, None)
    x, report = kinds[kind].forward(block, x, config, rows, given)
    return _pin(x if anchor is None else anchored(x, anchor), config), report

  if config.remat != "none":
    run = jax.checkpoint(run, static_argnums=3, policy=_KEPT[config.remat])
  reports = []
  for kind, block, given in zip(unit, *blocks_and_given, strict=True):
    x, report = run(x, block, given, kind)
    if rows.captured is not None:
      stream = jnp.take_along_axis(close_stream(x, config), rows.captured[..., None], axis=1)
      report = dataclasses.replace(report, captured=stream)
    reports.append(report)
  return x, reports
