"""Prediction heads (``models.mtp``) over slots: drafts of the tokens that come next.

At depth k the heads join the state ``s_t^{k-1}`` with token t + k, see ``models.mtp``. So a token
that goes into a slot gives every depth one state, k places back. A depth waits for the last state
of the depth before it; ``MtpCache.states`` holds one for each. With n tokens held and the next one
known, a draft takes that token through all depths, its first token through all but the first, and
so on: each depth then attends to states of its own, as in training. Behind the last depth its layer
is applied again to its own state, as DeepSeek-V3 and Nemotron 3 are served.

What drafts leave in keys and values lies beyond what the slot holds, and is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.blocks import KINDS, Appended, BlockKind, Stepped
from agentjax.models.cache import run_section
from agentjax.models.config import ModelConfig
from agentjax.models.heads import compute_logits
from agentjax.models.mtp import join
from agentjax.models.norm import rms_norm
from agentjax.models.passes import DecodeSection
from agentjax.models.stack import DecodeParams
from agentjax.models.verify import EVERY_SLOT

Array = jax.Array


@flax.struct.dataclass
class MtpCache:
  """What the heads keep of every slot.

  Attributes:
    states: [slots, depths, embed], ``s^{k-1}`` (index k - 1) of the last token it is known for.
    entries: per depth and block of ``config.mtp.pattern`` what ``BlockKind.init_cache`` makes. At
      depth k place t belongs to ``s_t^{k-1}``.
  """

  states: Array
  entries: tuple[tuple[Any, ...], ...]


def undraftable(config: ModelConfig) -> str | None:
  """Why a model's heads cannot draft; None where they can."""
  if config.mtp is None:
    return "no prediction heads (model.mtp is None)"
  if "M" in config.mtp.pattern:
    return f"recurrent blocks in its prediction heads (model.mtp.pattern={config.mtp.pattern!r})"
  return None


def init_mtp_cache(config: ModelConfig, slots: int, max_length: int, tokens: int) -> MtpCache:
  """Empty slots, for drafts of ``tokens`` tokens; deeper depths than these are left out."""
  assert config.mtp is not None
  depths = min(config.mtp.depths, tokens)
  return MtpCache(
    states=jnp.zeros((slots, depths, config.d_model), config.dtype),
    entries=tuple(
      tuple(KINDS[kind].init_cache(config, slots, max_length) for kind in config.mtp.pattern)
      for _ in range(depths)
    ),
  )


def follow(
  params: DecodeParams,
  config: ModelConfig,
  mtp_cache: MtpCache,
  where: Appended,
  hidden: Float[Array, "rows time embed"],
  token_ids: Int[Array, "rows time"],
  *,
  max_length: int,
  every_slot: bool = False,
) -> MtpCache:
  """Takes in tokens that went into slots.

  Args:
    params: from ``prepare_decode_params``, with the heads.
    config: of the params.
    mtp_cache: of the slots before these tokens.
    where: the tokens went there.
    hidden: of the model at these tokens, after its last norm.
    token_ids: right-padded, see ``where``.
    max_length: of the slots.
    every_slot: a row for every slot, in order.
  """
  kinds = EVERY_SLOT if every_slot else KINDS
  last = jnp.maximum(where.counts - 1, 0)[:, None, None]
  filled = jnp.where(where.counts > 0, where.rows, mtp_cache.states.shape[0])
  states, entries, state = mtp_cache.states, [], hidden
  for depth, entry in enumerate(mtp_cache.entries):
    before = mtp_cache.states.at[where.rows, depth].get(mode="clip")
    newest = jnp.take_along_axis(state, last, axis=1)[:, 0]
    states = states.at[filled, depth].set(newest, mode="drop")
    state = jnp.concatenate([before[:, None], state[:, :-1]], axis=1)
    place = where._replace(positions=_places(where.positions, depth, max_length))
    state, entry = _head(params, config, depth, state, token_ids, entry, place, kinds)
    entries.append(entry)
  return MtpCache(states, tuple(entries))


def draft(
  params: DecodeParams,
  config: ModelConfig,
  mtp_cache: MtpCache,
  lengths: Int[Array, " slots"],
  token_ids: Int[Array, " slots"],
  active: Bool[Array, " slots"],
  *,
  tokens: int,
  max_length: int,
  choose: Callable[[int, Float[Array, "slots vocab"]], Int[Array, " slots"]],
) -> tuple[Int[Array, "slots draft"], MtpCache]:
  """``tokens`` tokens that may follow the next one.

  Args:
    params, config, mtp_cache: see ``follow``.
    lengths: tokens the slots hold.
    token_ids: the token that follows these, not held yet.
    active: other slots keep what they hold, and their drafts mean nothing.
    tokens: of the draft.
    max_length: of the slots.
    choose: number of a drafted token from 0 on and its logits to the token.

  Returns:
    The drafts, and what the heads keep: of the slots as they were, for tokens that follow.
  """
  depths = len(mtp_cache.entries)
  states, entries = [mtp_cache.states[:, depth] for depth in range(depths)], list(mtp_cache.entries)
  drafts = []
  for step in range(tokens):
    speaking = min(step, depths - 1)  # depths before it have said what they can
    found = {}
    for depth in range(speaking, depths):
      place = Stepped(_places(lengths + step, depth, max_length), active)
      found[depth], entries[depth] = _head(
        params, config, depth, states[depth], token_ids, entries[depth], place, KINDS
      )
    for depth in range(speaking + 1, depths):
      states[depth] = found[depth - 1]
    if speaking == depths - 1:
      states[speaking] = found[speaking]
    token_ids = choose(step, compute_logits(params, config, found[speaking]))
    drafts.append(token_ids)
  return jnp.stack(drafts, axis=1), MtpCache(mtp_cache.states, tuple(entries))


def _places(positions: Array, depth: int, max_length: int) -> Array:
  """Where a depth (from 0) keeps the state that it joins with the token at a position.

  The first tokens of a context have no such state: past the end, where nothing is kept.
  """
  places = positions - (depth + 1)
  return jnp.where(places < 0, max_length, places)


def _head(
  params: DecodeParams,
  config: ModelConfig,
  depth: int,
  state: Array,
  token_ids: Array,
  entries: tuple[Any, ...],
  where: Appended | Stepped,
  kinds: Mapping[str, BlockKind],
) -> tuple[Array, tuple[Any, ...]]:
  """The next depth's states, and what its blocks keep."""
  assert params.mtp is not None and config.mtp is not None
  layer = params.mtp[min(depth, len(params.mtp) - 1)]
  pattern = config.mtp.pattern
  section = DecodeSection(pattern, layer.blocks, entries, (None,) * len(pattern))
  x = join(params, config, layer, token_ids, state)
  x, entries, _ = run_section(x, section, config=config, where=where, kinds=kinds)
  return rms_norm(x, layer.final_norm, config.norm_eps), entries
