"""Pieces: runs of tokens taken in by themselves, and slots that hold several of them in a row.

A piece is what a run of tokens leaves in an empty slot. Pieces in a row are what one slot would
hold after all the runs, had each token seen only its own run: keys are turned to where they now
stand, and recurrent states follow each other as maps (see ``BlockKind.join``). What a layer makes
of its inputs is exact; inputs of the second layer on are those of each run alone.

Keys and values need not be copied for that: ``cut_pages`` puts a piece into whole pages, and
``lay_out`` says where they stand in a row (``pages.Pieces``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from agentjax.models.blocks import KINDS
from agentjax.models.cache import HELD, Cache, extend, init_cache
from agentjax.models.config import ModelConfig
from agentjax.models.pages import Pieces
from agentjax.models.stack import DecodeParams

Array = jax.Array

# Runs are padded to a power of two of tokens, and to this many at least; ours.
_LEAST = 16


@flax.struct.dataclass
class Piece:
  """What a run of tokens leaves in an empty slot.

  Attributes:
    entries: per character of the pattern an entry of one slot, as in ``Cache.blocks``; keys, values
      and latents are cut to the run.
    length: tokens of the run.
  """

  entries: tuple[Any, ...]
  length: int = flax.struct.field(pytree_node=False)


class Layout(NamedTuple):
  """Where the pages of pieces stand in a row.

  Attributes:
    pages: of all pieces; the tail's follow.
    gap: places of those pages that hold no token.
    pieces: of this row, [entries] each.
    lengths: tokens of each piece.
    begins: position for which the first token of each piece was computed.
  """

  pages: int
  gap: int
  pieces: Pieces
  lengths: tuple[int, ...]
  begins: tuple[int, ...]


def unjoinable(config: ModelConfig) -> str | None:
  """What of a model keeps it from joining pieces, in a few words; None if nothing does."""
  if config.loop is not None or config.second_pass is not None:
    return "blocks that run more than once (model.loop, model.second_pass)"
  if config.exact_chunk:
    return "exact log-probs (model.exact_chunk), whose grid begins anew in every piece"
  empty = jax.eval_shape(lambda: init_cache(config, 1, 1)).blocks
  pairs = zip(config.pattern, empty, strict=True)
  wrong = sorted({k for k, entry in pairs if entry is not None and KINDS[k].join is None})
  return f"blocks without BlockKind.join ({', '.join(wrong)} in model.pattern)" if wrong else None


def piece_shapes(config: ModelConfig, length: int) -> tuple[Any, ...]:
  """Shapes and dtypes of the entries of a piece of so many tokens."""
  return jax.eval_shape(lambda: _noting(config, 1, length).blocks)


def run_piece(params: DecodeParams, config: ModelConfig, token_ids: np.ndarray) -> Piece:
  """Takes in a run by itself. The bits depend on the run alone.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params; see ``unjoinable``.
    token_ids: int32 [tokens], at least one.
  """
  length = len(token_ids)
  padded = np.zeros((1, max(_LEAST, 1 << (length - 1).bit_length())), np.int32)
  padded[0, :length] = token_ids
  return Piece(cut(_run(params, config, padded, np.array([length], np.int32)), length), length)


def run_rows(
  params: DecodeParams,
  config: ModelConfig,
  token_ids: Int[Array, "rows time"],
  counts: Int[Array, " rows"],
) -> tuple[Any, ...]:
  """Entries of one slot a row that took in its first ``counts`` tokens by themselves."""
  slots, time = token_ids.shape
  return extend(
    params, config, _noting(config, slots, time), jnp.arange(slots), token_ids, counts
  ).cache.blocks


def cut(entries: tuple[Any, ...], length: int) -> tuple[Any, ...]:
  """Keys, values and latents of the first ``length`` tokens, as a piece has them."""

  def one(entry: Any) -> Any:
    if not isinstance(entry, HELD):
      return entry
    return jax.tree.map(lambda v: v[..., :length, :], entry)

  return tuple(map(one, entries))


def join_pieces(
  params: DecodeParams, config: ModelConfig, pieces: Sequence[Piece], max_length: int
) -> Cache:
  """One slot that holds pieces in a row, and has room for ``max_length`` tokens in all.

  Logits of the next token are not known of it: at least one token must follow.

  Raises:
    ValueError: pieces that do not fit.
  """
  entries, lengths = [piece.entries for piece in pieces], [piece.length for piece in pieces]
  return join_rows(params, config, entries, lengths, max_length)


def join_rows(
  params: DecodeParams,
  config: ModelConfig,
  entries: Sequence[tuple[Any, ...]],
  lengths: Sequence[int],
  max_length: int,
) -> Cache:
  """``join_pieces`` of any number of slots, each with pieces of the same lengths; differentiable.

  Args:
    params, config, max_length: see ``join_pieces``.
    entries: of each piece, [slots, ...].
    lengths: tokens of each piece.
  """
  total = sum(lengths)
  if not entries or total >= max_length:
    raise ValueError(
      f"{len(entries)} pieces of {total} tokens; allowed: one or more that leave room in "
      f"max_length={max_length}."
    )
  empty = init_cache(config, len(jax.tree.leaves(entries)[0]), max_length)
  starts = [0, *itertools.accumulate(lengths[:-1])]
  joined = join_entries(params, config, entries, starts)

  def put(held: Array, value: Array) -> Array:
    return jnp.pad(value, [(0, n - m) for n, m in zip(held.shape, value.shape, strict=True)])

  blocks = jax.tree.map(put, empty.blocks, joined)
  return Cache(blocks=blocks, lengths=jnp.full_like(empty.lengths, total))


def join_entries(
  params: DecodeParams,
  config: ModelConfig,
  entries: Sequence[tuple[Any, ...]],
  starts: Sequence[int] | Int[Array, " pieces"],
) -> tuple[Any, ...]:
  """Entries of all blocks of slots that hold pieces in a row.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params.
    entries: of each piece; None in all of them where a block has none, or where its keys and values
      stay in pages (``states``).
    starts: position of each piece.
  """
  joined: list[Any] = []
  for kind, block, *own in zip(config.pattern, params.blocks, *entries, strict=True):
    join = KINDS[kind].join
    assert own[0] is None or join is not None, "see ``unjoinable``"
    joined.append(None if own[0] is None or join is None else join(block, own, starts, config))
  return tuple(joined)


def states(entries: Sequence[Any]) -> tuple[Any, ...]:
  """Entries without keys, values and latents."""
  return tuple(None if isinstance(entry, HELD) else entry for entry in entries)


def cut_pages(piece: Piece, tokens: int) -> tuple[Any, ...]:
  """Keys, values and latents in pages [pages, ..., tokens, width] of the host; None without.

  Behind the last token the last page is zero.
  """

  def pages(value: Array) -> np.ndarray:
    own = np.asarray(value)[0]
    spare = -own.shape[-2] % tokens
    own = np.pad(own, [(0, 0)] * (own.ndim - 2) + [(0, spare), (0, 0)])
    own = own.reshape(*own.shape[:-2], -1, tokens, own.shape[-1])
    return np.moveaxis(own, -3, 0)

  return tuple(
    jax.tree.map(pages, entry) if isinstance(entry, HELD) else None for entry in piece.entries
  )


def lay_out(
  lengths: Sequence[int], tokens: int, entries: int, begins: Sequence[int] | None = None
) -> Layout:
  """Rows of a table of pages that begin with pieces of these lengths.

  Args:
    lengths: tokens of each piece; of none, places are positions.
    tokens: of a page.
    entries: pages of a row.
    begins: see ``Layout``; None is 0 of each.

  Raises:
    ValueError: pieces that leave no page for what follows.
  """
  counts = [-(-length // tokens) for length in lengths]
  used = sum(counts)
  if used >= entries:
    raise ValueError(
      f"{len(lengths)} pieces take {used} pages of {tokens} tokens; allowed: fewer than {entries}."
    )
  gap = used * tokens - sum(lengths)
  firsts = np.arange(entries, dtype=np.int32) * tokens - gap
  valid, turns = np.full(entries, tokens, np.int32), np.zeros(entries, np.int32)
  page = start = 0
  begins = tuple(begins or (0,) * len(lengths))
  for count, length, begin in zip(counts, lengths, begins, strict=True):
    own, inside = slice(page, page + count), np.arange(count, dtype=np.int32) * tokens
    firsts[own], turns[own] = start + inside, start - begin
    valid[own] = np.minimum(length - inside, tokens)
    page, start = page + count, start + length
  pieces = Pieces(firsts, valid, turns)  # type: ignore[arg-type]
  return Layout(used, gap, pieces, tuple(lengths), begins)


_run = jax.jit(run_rows, static_argnames="config")


def _noting(config: ModelConfig, slots: int, length: int) -> Cache:
  """Empty slots that note what joining needs."""
  cache = init_cache(config, slots, length)
  pairs = zip(config.pattern, cache.blocks, strict=True)
  blocks = tuple(None if entry is None else KINDS[kind].note(entry) for kind, entry in pairs)
  return Cache(blocks=blocks, lengths=cache.lengths)
