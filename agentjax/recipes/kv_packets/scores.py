"""The trainer's scores of a conversation with packets: what the sampler computed, differentiable.

The trainer reads whole rows of tokens, so it needs no pages. Header and trailer are put back around
every packet (``spread``), and each block with a memory runs twice over the row: once where every
packet, and every text between packets, is a sequence of its own, and once over whole conversations.
Tokens of packets take the first result, all others the second.

* Attention: a packet's tokens see their own packet, later tokens see everything. All keys are
  turned to where they stand in the conversation; scores depend on distances alone, so inside a
  packet they are those of a packet that begins at position 0.
* Mamba-2: the scan of the second run over the packet's inputs is ``S -> exp(l) S + C``, with the
  convolution run through across the seam, as in ``join_states``.

Blocks without a memory run once. The header, the trailer and all that packets hold are computed
with the weights that are trained, and the gradient goes through them; header and trailer are fixed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.blocks import KINDS, BlockKind, Rows
from agentjax.models.cache import init_cache
from agentjax.models.config import ModelConfig
from agentjax.models.heads import TokenScores, score_targets
from agentjax.models.stack import Params, forward, open_stream
from agentjax.recipes.kv_packets.adapter import Adapter
from agentjax.training.likelihood import ScoreTokens

Array = jax.Array

_MULTIPLE = 128  # rows grow by a multiple of it, which kernels of attention ask for


class Spread(NamedTuple):
  """Rows [B, S] with room around packets, and where the tokens of [B, T] stand in them.

  Attributes:
    places: int32 [B, T], of each token in its new row.
    owners: int32 [B, S], the token of the old row that a place belongs to: itself, or the one that
      a header or a trailer stands next to.
    extra: int32 [B, S], the row of header and trailer together that stands there; -1 for none.
    segment_ids, positions: int32 [B, S], of conversations.
    runs: int32 [B, S], 0 on padding, else the number of a packet or of a text between packets.
    packet: bool [B, S], whether a place is part of a packet.
    fits: bool [B], whether the new row has room for all of the old one.
  """

  places: Array
  owners: Array
  extra: Array
  segment_ids: Array
  positions: Array
  runs: Array
  packet: Array
  fits: Array


def spread(
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  inside: Int[Array, "batch time"],
  *,
  header: int,
  trailer: int,
  length: int,
) -> Spread:
  """Makes room for header and trailer around every packet.

  Args:
    segment_ids, positions: as of ``forward``.
    inside: place of a token in its packet's document; -1 outside.
    header, trailer: tokens of each.
    length: S.
  """
  time = segment_ids.shape[1]
  packet, begins = inside >= 0, inside == 0
  # A row may end, or another packet or conversation begin, right behind a packet.
  goes_on = _left(packet & ~begins, False) & (_left(segment_ids, 0) == segment_ids)
  ends = packet & ~goes_on
  widths = 1 + header * begins + trailer * ends
  behind = jnp.cumsum(widths, axis=1)
  starts = behind - widths
  places = starts + header * begins
  at = jnp.broadcast_to(jnp.arange(length), (len(segment_ids), length))
  owners = jax.vmap(lambda row, x: jnp.searchsorted(row, x, side="right"))(behind, at)
  used = owners < time
  owners = jnp.minimum(owners, time - 1)

  def own(x: Array) -> Array:
    return jnp.take_along_axis(x, owners, axis=1)

  offsets = at - own(places)
  extra = jnp.where(offsets < 0, header + offsets, header + offsets - 1)
  firsts = jnp.take_along_axis(starts, jnp.arange(time) - positions, axis=1)
  border = begins | _right(ends, True) | (_right(segment_ids, -1) != segment_ids)
  segments = jnp.where(used, own(segment_ids), 0)
  return Spread(
    places=places,
    owners=owners,
    extra=jnp.where(used & (offsets != 0), extra, -1),
    segment_ids=segments,
    positions=at - own(firsts),
    runs=jnp.where(segments > 0, own(jnp.cumsum(border, axis=1)), 0),
    packet=used & own(packet),
    fits=behind[:, -1] <= length,
  )


def packet_scores(adapter: Adapter | None, least_tokens: int) -> ScoreTokens:
  """Scores of tokens outside packets, which were read as the sampler did.

  ``marks`` is the column ``packet_places``. The scores of a packet's tokens, and of a token right
  behind one, are 0: the sampler has none. All scores of a row that has no room for its packets are
  not a number.

  Args:
    adapter: around every packet; no gradient reaches it.
    least_tokens: no packet has fewer; rows have room for as many as fit.
  """
  header, trailer = (0, 0) if adapter is None else (len(adapter.header), len(adapter.trailer))

  def score(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    segment_ids: Array,
    positions: Array,
    *,
    marks: Array,
    temperature: float | Array = 1.0,
  ) -> TokenScores:
    time = token_ids.shape[1]
    more = time // least_tokens * (header + trailer)
    length = time + -(-more // _MULTIPLE) * _MULTIPLE
    sizes = {"header": header, "trailer": trailer, "length": length}
    room = spread(segment_ids, positions, marks, **sizes)
    ids = jnp.take_along_axis(token_ids, room.owners, axis=1)
    out = forward(
      params,
      config,
      ids,
      room.segment_ids,
      room.positions,
      embedded=None if adapter is None else _embedded(params, config, ids, room.extra, adapter),
      kinds=twice(config, room.runs, room.packet),
    )
    hidden = jnp.take_along_axis(out.hidden, room.places[..., None], axis=1)
    found = score_targets(params, config, hidden, jnp.roll(token_ids, -1, axis=1), temperature)
    read = (segment_ids == 0) | (marks >= 0)
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & ~read[:, 1:] & ~read[:, :-1]
    nan = jnp.where(room.fits, 0.0, jnp.nan)[:, None]
    scores = (jnp.pad(jnp.where(follows, v[:, :-1], 0.0), ((0, 0), (1, 0))) + nan for v in found)
    log_probs, entropies, log_normalizers = scores
    return TokenScores(
      log_probs=log_probs,
      entropies=entropies,
      log_normalizers=log_normalizers,
      hidden=hidden,
      routing=out.routing,
      max_scores=None,
      captured=None,
    )

  return score


def twice(
  config: ModelConfig, runs: Int[Array, "batch time"], packet: Bool[Array, "batch time"]
) -> dict[str, BlockKind]:
  """Kinds whose blocks with a memory run over ``runs`` for packets, and over whole rows."""
  entries = jax.eval_shape(lambda: init_cache(config, 1, 1)).blocks
  remember = {k for k, entry in zip(config.pattern, entries, strict=True) if entry is not None}

  def choose(alone: Array, whole: Array) -> Array:
    return jnp.where(packet.reshape(*packet.shape, *(1,) * (alone.ndim - 2)), alone, whole)

  def of(kind: BlockKind) -> BlockKind:
    def run(params: Any, x: Any, config: ModelConfig, rows: Rows, given: Any):
      alone, _ = kind.forward(params, x, config, rows._replace(segment_ids=runs), given)
      whole, report = kind.forward(params, x, config, rows, given)
      return jax.tree.map(choose, alone, whole), report

    return dataclasses.replace(kind, forward=run)

  return {k: of(KINDS[k]) if k in remember else KINDS[k] for k in set(config.pattern)}


def _embedded(
  params: Params,
  config: ModelConfig,
  ids: Int[Array, "batch time"],
  extra: Int[Array, "batch time"],
  adapter: Adapter,
) -> Float[Array, "batch time embed"]:
  rows = jnp.concatenate([adapter.header, adapter.trailer]).astype(config.dtype)
  x, _ = open_stream(params, config, ids)
  return jnp.where(extra[..., None] >= 0, rows[jnp.maximum(extra, 0)], x)


def _left(x: Array, fill: Any) -> Array:
  """What stands one place later."""
  return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)


def _right(x: Array, fill: Any) -> Array:
  """What stands one place earlier."""
  return jnp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=fill)
