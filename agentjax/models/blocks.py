"""What a character of the pattern stands for: one table of block kinds that the stack runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from agentjax.models.attention import (
  attention,
  attention_extend,
  attention_spec,
  attention_step,
  init_kv_cache,
)
from agentjax.models.config import ModelConfig
from agentjax.models.mamba2 import (
  init_mamba_cache,
  mamba2,
  mamba2_extend,
  mamba2_spec,
  mamba2_step,
)
from agentjax.models.mlp import mlp, mlp_spec
from agentjax.models.moe import Routing, moe, moe_spec
from agentjax.models.norm import norm_spec, rms_norm
from agentjax.models.spec import Weight

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


class Appended(NamedTuple):
  """Tokens that go into slots, right-padded to [R, C]."""

  rows: Array  # int32 [R], slot of each row; the number of slots for a row that is not used
  positions: Array  # int32 [R, C], place of each token in its slot
  counts: Array  # int32 [R], tokens of each row that are not padding

  @property
  def real(self) -> Array:
    """bool [R, C], False on padding."""
    return jnp.arange(self.positions.shape[1]) < self.counts[:, None]


class Stepped(NamedTuple):
  """One token for every active slot."""

  lengths: Array  # int32 [S], tokens each slot holds, where the new one goes
  active: Array  # bool [S]


@dataclasses.dataclass(frozen=True)
class BlockKind:
  """What the stack asks of a kind of block; every function is pure.

  ``given`` is what the stack hands to this very block beside the stream, or None: for blocks with
  a router, expert ids [..., choices] to use in the place of its own choice. ``experts`` are the
  expert ids it used, None without a router.

  Attributes:
    spec: ``config -> params``, a tree of ParamSpec.
    forward: ``(params, x, config, rows, given) -> (x, routing or None)`` on [B, T, embed].
    init_cache: ``(config, slots, length) -> entry``: what slots keep of their past, or None.
    extend: ``(params, x, entry, config, appended, given) -> (x, entry, experts)``, [R, C, embed].
    step: ``(params, x, entry, config, stepped, given) -> (x, entry, experts)``, x [S, embed].
    routes: whether it has a router.
  """

  spec: Callable[[ModelConfig], Any]
  forward: Callable[..., tuple[Array, Routing | None]]
  init_cache: Callable[[ModelConfig, int, int], Any]
  extend: Callable[..., tuple[Array, Any, Array | None]]
  step: Callable[..., tuple[Array, Any, Array | None]]
  routes: bool = False


def _residual(mixer_spec: Callable[[ModelConfig], Any], **functions: Any) -> BlockKind:
  """A pre-norm block; ``functions`` run the mixer on the normed stream."""

  def spec(config: ModelConfig) -> Block:
    return Block(norm=norm_spec(config.d_model, config), mixer=mixer_spec(config))

  def forward(params: Block, x: Array, config: ModelConfig, rows: Rows, given: Any):
    inputs = rms_norm(x, params.norm, config.norm_eps)
    out, routing = functions["forward"](params.mixer, inputs, config, rows, given)
    return x + out, routing

  def decode(run: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(params: Block, x: Array, entry: Any, config: ModelConfig, where: Any, given: Any):
      inputs = rms_norm(x, params.norm, config.norm_eps)
      out, entry, experts = run(params.mixer, inputs, entry, config, where, given)
      return x + out, entry, experts

    return wrapped

  return BlockKind(
    spec=spec,
    forward=forward,
    init_cache=functions.get("init_cache", lambda config, slots, length: None),
    extend=decode(functions["extend"]),
    step=decode(functions["step"]),
    routes=functions.get("routes", False),
  )


def _mamba2() -> BlockKind:
  def forward(params, x, config, rows, given):
    del given
    return mamba2(params, x, config, segment_ids=rows.segment_ids), None

  def extend(params, x, entry, config, appended, given):
    del given
    out, entry = mamba2_extend(params, x, entry, config, rows=appended.rows, counts=appended.counts)
    return out, entry, None

  def step(params, x, entry, config, stepped, given):
    del given
    out, entry = mamba2_step(params, x, entry, config, active=stepped.active)
    return out, entry, None

  return _residual(
    mamba2_spec,
    forward=forward,
    extend=extend,
    step=step,
    init_cache=lambda config, slots, length: init_mamba_cache(config, slots),
  )


def _attention() -> BlockKind:
  def forward(params, x, config, rows, given):
    del given
    out = attention(params, x, config, segment_ids=rows.segment_ids, positions=rows.positions)
    return out, None

  def extend(params, x, entry, config, appended, given):
    del given
    return *attention_extend(params, x, entry, config, **appended._asdict()), None

  def step(params, x, entry, config, stepped, given):
    del given
    return *attention_step(params, x, entry, config, **stepped._asdict()), None

  return _residual(
    attention_spec, forward=forward, extend=extend, step=step, init_cache=init_kv_cache
  )


def _mlp() -> BlockKind:
  def decode(params, x, entry, config, where, given):
    del config, where, given
    return mlp(params, x), entry, None

  return _residual(
    lambda config: mlp_spec(config, config.d_mlp),
    forward=lambda params, x, config, rows, given: (mlp(params, x), None),
    extend=decode,
    step=decode,
  )


def _moe() -> BlockKind:
  def forward(params, x, config, rows, given):
    return moe(params, x, config, real=rows.segment_ids != 0, experts=given)

  def extend(params, x, entry, config, appended, given):
    out, routing = moe(params, x, config, real=appended.real, experts=given)
    return out, entry, routing.experts

  def step(params, x, entry, config, stepped, given):
    out, routing = moe(params, x, config, real=stepped.active, experts=given)
    return out, entry, routing.experts

  return _residual(moe_spec, forward=forward, extend=extend, step=step, routes=True)


KINDS: Mapping[str, BlockKind] = {
  "M": _mamba2(),
  "*": _attention(),
  "-": _mlp(),
  "E": _moe(),
}
