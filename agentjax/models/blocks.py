"""The table of block kinds: what each character of the pattern means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from agentjax.config import check
from agentjax.models.attend import Sight
from agentjax.models.attention import (
  attention,
  attention_extend,
  attention_spec,
  attention_step,
  init_kv_cache,
  join_heads,
  rotary,
)
from agentjax.models.config import BUILT_IN, GEMMA_KINDS, ModelConfig
from agentjax.models.config import KINDS as NAMES
from agentjax.models.mamba2 import (
  init_mamba_cache,
  join_states,
  mamba2,
  mamba2_extend,
  mamba2_spec,
  mamba2_step,
  with_opening,
)
from agentjax.models.mla import (
  init_latent_cache,
  join_latents,
  mla,
  mla_extend,
  mla_spec,
  mla_step,
)
from agentjax.models.mlp import mlp, mlp_spec
from agentjax.models.moe import Routing, moe, moe_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import Weight
from agentjax.names import load

Array = jax.Array


@flax.struct.dataclass
class Block:
  """``x + mixer(norm x)``."""

  norm: Weight  # [embed]
  mixer: Any


class Rows(NamedTuple):
  """Packed rows, as training sees them; int32 [B, T]."""

  segment_ids: Array  # 0 on padding
  positions: Array  # place of a token in its sequence
  captured: Array | None = None  # int32 [B, K], places whose stream every block reports
  sight: Sight | None = None  # what tokens see instead of those before them


class Appended(NamedTuple):
  """Tokens that go into slots, right-padded to [R, C]."""

  rows: Array  # int32 [R], slot of each row; the number of slots for a row that is not used
  positions: Array  # int32 [R, C], place of each token in its slot
  counts: Array  # int32 [R], tokens of each row that are not padding
  sees: Array | None = None  # int32 [R, C], last place that each token sees; None is its own

  @property
  def real(self) -> Array:
    """bool [R, C], False on padding."""
    return jnp.arange(self.positions.shape[1]) < self.counts[:, None]


class Stepped(NamedTuple):
  """One token for every active slot."""

  lengths: Array  # int32 [S], tokens each slot holds, where the new one goes
  active: Array  # bool [S]

  @property
  def real(self) -> Array:
    """bool [S], whose tokens are not padding."""
    return self.active


@flax.struct.dataclass
class BlockReport:
  """Further results of a block in the training forward, besides the stream.

  Attributes:
    routing: of its router; None without one.
    max_scores: float32 [attentions, heads], see ``attend.max_scores``; None unless
      ``config.record_max_scores``, or without attention.
    captured: [B, K, embed], the stream after the block at ``Rows.captured``; None without these.
  """

  routing: Routing | None = None
  max_scores: Array | None = None
  captured: Array | None = None


@dataclasses.dataclass(frozen=True)
class StreamKind:
  """The stream between blocks that read more than one array [*lead, embed].

  Attributes:
    spec: ``config -> params`` of its own parameters, a tree of ParamSpec or None.
    open: ``(embedded, params, config, token_ids) -> (stream, inputs)``: the stream that the first
      block reads, and inputs of all blocks [*lead, blocks, ...] or None.
    give: ``(inputs, number, experts) -> given`` of one block, see ``BlockKind``.
    close: the array [*lead, embed] that a stream carries.
    replace: ``(stream, array) -> stream`` that carries another array.
    sees_images: whether ``open`` reads images of the tokens.
  """

  spec: Callable[[ModelConfig], Any]
  open: Callable[[Array, Any, ModelConfig, Array], tuple[Any, Array | None]]
  give: Callable[[Array | None, int, Array | None], Any]
  close: Callable[[Any], Array]
  replace: Callable[[Any, Array], Any]
  sees_images: bool = False


def _same(entry: Any) -> Any:
  return entry


@dataclasses.dataclass(frozen=True)
class BlockKind:
  """The functions of a kind of block; all are pure.

  ``given`` is the stack's further input to this block, or None. For blocks with a router it holds
  expert ids [..., choices] that replace the router's choice; with ``reads_tokens`` the token ids;
  with a ``stream`` it is the result of ``give``, and x is the opened stream. ``experts`` are the
  expert ids that were used, None without a router.

  Attributes:
    spec: ``config -> params``, a tree of ParamSpec.
    forward: ``(params, x, config, rows, given) -> (x, BlockReport)`` on [B, T, embed].
    init_cache: ``(config, slots, length) -> entry``: the contents of empty slots, a pytree of
      arrays whose leading axis is the slot, or None. A slot is reset to this before it is used
      again. An engine stores keys, values and latents, which start at zero, in pages
      (``cache.in_pages``).
    extend: ``(params, x, entry, config, appended, given) -> (x, entry, experts)``, [R, C, embed]; a
      row without tokens, or without a slot, changes nothing.
    step: ``(params, x, entry, config, stepped, given) -> (x, entry, experts)``, x [S, embed]; a
      slot that is not active does not change.
    join: ``(params, entries, starts, config) -> entry``: of one slot that holds several runs of
      tokens one after the other, each taken in by ``extend`` in a slot of its own that was empty
      (``note`` of it), arrays over tokens cut to the run's; ``starts`` are the positions of the
      first tokens. What a slot holds without a ``note`` may come first. None: entries cannot be
      joined; a kind without entries needs none.
    note: ``entry -> entry`` of an empty slot that also keeps what ``join`` needs to know.
    routes: whether it has a router.
    reads_tokens: whether it is given the token ids [...].
    stream: kind of stream between such blocks, which then make up the whole pattern; None is an
      array.
  """

  spec: Callable[[ModelConfig], Any]
  forward: Callable[..., tuple[Array, BlockReport]]
  init_cache: Callable[[ModelConfig, int, int], Any]
  extend: Callable[..., tuple[Array, Any, Array | None]]
  step: Callable[..., tuple[Array, Any, Array | None]]
  join: Callable[[Any, Sequence[Any], Any, ModelConfig], Any] | None = None
  note: Callable[[Any], Any] = _same
  routes: bool = False
  reads_tokens: bool = False
  stream: StreamKind | None = None


def _empty(config: ModelConfig, slots: int, length: int) -> None:
  """No state."""
  del config, slots, length


def residual_block(
  mixer_spec: Callable[[ModelConfig], Any],
  *,
  forward: Callable[..., tuple[Array, BlockReport]],
  extend: Callable[..., tuple[Array, Any, Array | None]],
  step: Callable[..., tuple[Array, Any, Array | None]],
  init_cache: Callable[[ModelConfig, int, int], Any] = _empty,
  join: Callable[[Any, Sequence[Any], Any, ModelConfig], Any] | None = None,
  routes: bool = False,
  reads_tokens: bool = False,
) -> BlockKind:
  """A pre-norm block ``x + mixer(norm x)``.

  Args:
    mixer_spec: of the mixer's parameters; the norm's are added.
    forward, extend, step: as in ``BlockKind``, from the normed stream to the array that is added.
    join: as in ``BlockKind``, with the mixer's parameters.
    init_cache, routes, reads_tokens: as in ``BlockKind``.
  """

  def spec(config: ModelConfig) -> Block:
    return Block(norm=norm_spec(config.d_model, config), mixer=mixer_spec(config))

  def whole(params: Block, x: Array, config: ModelConfig, rows: Rows, given: Any):
    inputs = rms_norm(x, params.norm, config.norm_eps)
    out, report = forward(params.mixer, inputs, config, rows, given)
    return x + out, report

  def decode(run: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(params: Block, x: Array, entry: Any, config: ModelConfig, where: Any, given: Any):
      inputs = rms_norm(x, params.norm, config.norm_eps)
      out, entry, experts = run(params.mixer, inputs, entry, config, where, given)
      return x + out, entry, experts

    return wrapped

  return BlockKind(
    spec=spec,
    forward=whole,
    init_cache=init_cache,
    extend=decode(extend),
    step=decode(step),
    join=None if join is None else lambda params, *of: join(params.mixer, *of),
    routes=routes,
    reads_tokens=reads_tokens,
  )


def _mamba2() -> BlockKind:
  def forward(params, x, config, rows, given):
    del given
    return mamba2(params, x, config, segment_ids=rows.segment_ids), BlockReport()

  def extend(params, x, entry, config, appended, given):
    del given
    out, entry = mamba2_extend(params, x, entry, config, rows=appended.rows, counts=appended.counts)
    return out, entry, None

  def step(params, x, entry, config, stepped, given):
    del given
    out, entry = mamba2_step(params, x, entry, config, active=stepped.active)
    return out, entry, None

  kind = residual_block(
    mamba2_spec,
    forward=forward,
    extend=extend,
    step=step,
    init_cache=lambda config, slots, length: init_mamba_cache(config, slots),
    join=lambda params, entries, starts, config: join_states(params, entries, config),
  )
  return dataclasses.replace(kind, note=with_opening)


def _attention(
  spec: Callable[[ModelConfig], Any],
  attend: Callable[..., tuple[Array, Array | None]],
  attend_extend: Callable[..., tuple[Array, Any]],
  attend_step: Callable[..., tuple[Array, Any]],
  init_cache: Callable[[ModelConfig, int, int], Any],
  join: Callable[[Sequence[Any], Any, ModelConfig], Any],
) -> BlockKind:
  def forward(params, x, config, rows, given):
    del given
    ids = {"segment_ids": rows.segment_ids, "positions": rows.positions}
    out, top = attend(params, x, config, **ids, sight=rows.sight)
    return out, BlockReport(max_scores=None if top is None else top[None])

  def extend(params, x, entry, config, appended, given):
    del given
    return *attend_extend(params, x, entry, config, **appended._asdict()), None

  def step(params, x, entry, config, stepped, given):
    del given
    return *attend_step(params, x, entry, config, **stepped._asdict()), None

  return residual_block(
    spec,
    forward=forward,
    extend=extend,
    step=step,
    init_cache=init_cache,
    join=lambda params, *of: join(*of),
  )


def _mlp() -> BlockKind:
  def decode(params, x, entry, config, where, given):
    del where, given
    return mlp(params, x, config.mlp_activation), entry, None

  return residual_block(
    lambda config: mlp_spec(config, config.d_mlp),
    forward=lambda params, x, config, rows, given: (
      mlp(params, x, config.mlp_activation),
      BlockReport(),
    ),
    extend=decode,
    step=decode,
  )


def _moe() -> BlockKind:
  def forward(params, x, config, rows, given):
    out, routing = moe(params, x, config, segment_ids=rows.segment_ids, experts=given)
    return out, BlockReport(routing=routing)

  def extend(params, x, entry, config, appended, given):
    real = appended.real.astype(jnp.int32)
    out, routing = moe(params, x, config, segment_ids=real, experts=given)
    return out, entry, routing.experts

  def step(params, x, entry, config, stepped, given):
    active = stepped.active.astype(jnp.int32)
    out, routing = moe(params, x, config, segment_ids=active, experts=given)
    return out, entry, routing.experts

  return residual_block(moe_spec, forward=forward, extend=extend, step=step, routes=True)


_FAMILIES = "agentjax.adapters.model_families"
# Blocks that only one family of models has, by name.
_NAMED = {
  "S": f"{_FAMILIES}.longcat_flash:BLOCK",
  "V": f"{_FAMILIES}.parcae:BLOCK",
  **{kind: f"{_FAMILIES}.gemma4_block:BLOCKS.{kind}" for kind in GEMMA_KINDS},
}


class _Kinds(dict[str, BlockKind]):
  """Kinds of blocks by their characters; a kind given by name is loaded at its first use."""

  def __missing__(self, character: str) -> BlockKind:
    self[character] = kind = load(_NAMED[character], f"pattern {character!r}", "a BlockKind")
    return kind


KINDS = _Kinds(
  {
    "M": _mamba2(),
    "*": _attention(
      attention_spec,
      attention,
      attention_extend,
      attention_step,
      init_kv_cache,
      lambda entries, starts, config: join_heads(entries, starts, rotary(config)),
    ),
    "-": _mlp(),
    "E": _moe(),
    "A": _attention(mla_spec, mla, mla_extend, mla_step, init_latent_cache, join_latents),
  }
)


def register_block(character: str, kind: BlockKind, *, name: str) -> None:
  """Gives a character of ``ModelConfig.pattern`` a block of your own.

  Everything that runs a pattern looks the character up: training, scoring, sampling, forks, parked
  contexts, checkpoints, sharding and adapters. Call it when your module is imported, and import
  that module in the Python file that ``--config`` names. If that file is loaded twice, a block of
  the same name replaces itself.

  Args:
    character: one printable character that no other block has.
    kind: the block; ``residual_block`` makes one of a mixer.
    name: in a few words, for messages.

  Raises:
    ConfigError: the character is taken or is not one printable character.
  """
  check(
    len(character) == 1 and character.isprintable() and not character.isspace(),
    "character",
    character,
    "one printable character",
  )
  check(
    character not in NAMES or (character not in BUILT_IN and NAMES[character] == name),
    "character",
    character,
    f"none of {', '.join(f'{k!r} ({v})' for k, v in NAMES.items())}, which are taken",
  )
  KINDS[character] = kind
  NAMES[character] = name
