"""One compiled computation for sampling and training, so that both see the same bits.

XLA rounds one formula in more than one way: a matrix product by the number of its rows, a fused
multiply-add by what else stands in the loop, an exponential by its place in a vector. So a token
has one log-prob in sampling and training only where both execute the same instructions on the same
shapes. With ``config.exact_chunk = C`` a sequence is cut on a grid of C tokens, and all that reads
tokens runs ``run_chunk``: C tokens of one sequence, from the state at the chunk's start. A slot
keeps that state and the ids of the chunk under way, which each new token runs again; training runs
the chunks one after the other. What stands behind a token in its chunk is an exact zero in
every sum, so a chunk half full gives the bits of a full one. One sequence at a time is computed:
neither slot nor neighbours can matter.

Every block, the read-out and the softmax are computations of their own (``_apart``): XLA fuses
nothing across their borders, and without these rounding would depend on what a result is used for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.attention import attention_chunk
from agentjax.models.blocks import KINDS, Appended, Block
from agentjax.models.config import ModelConfig
from agentjax.models.heads import compute_logits, distribution
from agentjax.models.mla import mla_chunk
from agentjax.models.norm import rms_norm
from agentjax.models.pages import Held, Paged, is_paged, write_places
from agentjax.models.stack import DecodeParams, open_stream

Array = jax.Array

# Kinds that keep something of every token, and how they read it; the others keep a state.
_ATTEND: Mapping[str, Callable[..., tuple[Array, Any]]] = {"*": attention_chunk, "A": mla_chunk}


class ChunkRun(NamedTuple):
  """Result of ``run_chunk``; what stands at padding means nothing.

  Attributes:
    streams: [blocks, C, embed], the residual stream after every block.
    hidden: [C, embed], after the last norm.
    entries: of the cache, with the chunk's keys; recurrent states are those after the chunk if it
      is full, else those before it.
    experts: int32 [routers, C, choices]; None without a router.
  """

  streams: Array
  hidden: Array
  entries: tuple[Any, ...]
  experts: Array | None


class Scored(NamedTuple):
  """Result of ``score_rows``; zeros at padding.

  Attributes:
    streams: [blocks, B, T, embed].
    hidden: [B, T, embed].
    experts: int32 [routers, B, T, choices]; None without a router.
    log_probs, entropies, log_normalizers: float32 [B, T], of each token's target.
  """

  streams: Array
  hidden: Array
  experts: Array | None
  log_probs: Array
  entropies: Array
  log_normalizers: Array


def run_chunk(
  params: DecodeParams,
  config: ModelConfig,
  entries: tuple[Any, ...],
  slot: Int[Array, ""],
  token_ids: Int[Array, " chunk"],
  start: Int[Array, ""],
  count: Int[Array, ""],
) -> ChunkRun:
  """``count`` tokens of one slot from place ``start`` on, a multiple of C.

  Args:
    params: from ``prepare_decode_params``.
    config: with ``exact_chunk = C``.
    entries: of a cache; recurrent states are those at ``start``.
    slot: which of the cache's.
    token_ids: [C], right-padded.
    start: tokens before these.
    count: tokens that are not padding, at least 1.
  """
  x, _ = open_stream(params, config, token_ids[None])
  after, streams, routed = [], [], []
  for kind, block, entry in zip(config.pattern, params.blocks, entries, strict=True):
    if kind in _ATTEND:
      attend = functools.partial(_attend, config=config, kind=kind)
      x, new = _apart(count > 0, attend, block, x, entry, slot, start)
      # Behind a token that is still to come stands nothing that is read before it is overwritten.
      lay = functools.partial(_lay, slot=slot, start=start)
      entry = jax.tree.map(lay, entry, new, is_leaf=is_paged)
    else:
      mix = functools.partial(_mix, config=config, kind=kind)
      own = jax.tree.map(lambda v: v[slot][None], entry)
      x, new, experts = _apart(count > 0, mix, block, x, own, start, count)
      full = count == config.exact_chunk
      kept = jax.tree.map(functools.partial(jnp.where, full), new, own)
      entry = jax.tree.map(lambda v, k: v.at[slot].set(k[0]), entry, kept)
      routed += [] if experts is None else [experts[0]]
    after.append(entry)
    streams.append(x[0])
  norm = functools.partial(rms_norm, eps=config.norm_eps)
  hidden = _apart(count > 0, norm, x, params.final_norm)[0]
  return ChunkRun(jnp.stack(streams), hidden, tuple(after), jnp.stack(routed) if routed else None)


def _attend(
  block: Block, x: Array, entry: Any, slot: Array, start: Array, config: ModelConfig, kind: str
) -> tuple[Array, Any]:
  inputs = rms_norm(x, block.norm, config.norm_eps)
  out, new = _ATTEND[kind](block.mixer, inputs, entry, config, slot=slot, start=start)
  return x + out, new


def _mix(
  block: Block, x: Array, entry: Any, start: Array, count: Array, config: ModelConfig, kind: str
) -> tuple[Array, Any, Array | None]:
  positions = start + jnp.arange(config.exact_chunk)[None]
  appended = Appended(jnp.zeros((1,), jnp.int32), positions, count[None])
  return KINDS[kind].extend(block, x, entry, config, appended, None)


def _lay(held: Held, new: Array, slot: Array, start: Array) -> Held:
  """``new`` [1, ..., C, width] at places ``start`` and on of a slot."""
  if isinstance(held, Paged):
    places = start + jnp.arange(new.shape[-2])
    return write_places(held, slot[None], places[None], jnp.moveaxis(new, -2, 1))
  zero = jnp.int32(0)
  place = (slot, *(zero,) * (held.ndim - 3), start, zero)
  return jax.lax.dynamic_update_slice(held, new, place)


def read_out(
  params: DecodeParams, config: ModelConfig, hidden: Float[Array, " embed"], count: Int[Array, ""]
) -> Float[Array, " vocab"]:
  """Float32 logits of one token; ``count`` as of ``run_chunk``."""

  def run(params: DecodeParams, row: Array) -> Array:
    return compute_logits(params, config, row)

  head = dataclasses.replace(params, blocks=())
  return _apart(count > 0, run, head, hidden[None])[0]


def distribution_by_row(
  logits: Float[Array, "rows vocab"], temperatures: Float[Array, " rows"]
) -> tuple[Float[Array, "rows vocab"], Float[Array, " rows"], Float[Array, " rows"]]:
  """``heads.distribution`` of one row after the other, whatever their number is."""
  return jax.lax.map(lambda row: _distribution(*row), (logits, temperatures))


def _distribution(logits: Array, temperature: Array) -> tuple[Array, Array, Array]:
  """``heads.distribution`` of one row."""
  found = _apart(temperature > 0, distribution, logits[None], temperature[None])
  return jax.tree.map(lambda v: v[0], found)


def _apart(sure: Array, function: Callable[..., Any], *operands: Any) -> Any:
  """``function(*operands)`` as a computation of its own; ``sure`` holds, which XLA must not know.

  XLA takes ``optimization_barrier`` away before it fuses on a CPU; the branches of a condition stay
  apart.
  """
  shapes = jax.eval_shape(function, *operands)
  nothing = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  return jax.lax.cond(sure, function, lambda *_: nothing(), *operands)


def score_rows(
  params: DecodeParams,
  config: ModelConfig,
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  targets: Int[Array, "batch time"],
  temperature: Float[Array, ""],
) -> Scored:
  """All chunks of packed rows whose sequences start on the grid, one after the other.

  Args:
    params: from ``prepare_decode_params``. No gradient is defined.
    config: with ``exact_chunk = C``, of which T is a multiple.
    token_ids, segment_ids, positions: see ``stack.forward``; every sequence starts at a multiple of
      C in its row.
    targets: what each token is to predict.
    temperature: divides the logits.
  """
  batch, time = token_ids.shape
  size = config.exact_chunk
  token_ids, segment_ids, positions = map(jnp.asarray, (token_ids, segment_ids, positions))
  pieces = batch * time // size
  cut = [v.reshape(pieces, size) for v in (token_ids, targets)]
  counts = jnp.sum(segment_ids.reshape(pieces, size) != 0, axis=1)
  starts = positions.reshape(pieces, size)[:, 0]
  (busy,) = jnp.nonzero(counts > 0, size=pieces, fill_value=0)
  # Not a constant, which XLA would put into the division.
  divisor = jnp.where(jnp.sum(counts) >= 0, jnp.asarray(temperature, jnp.float32), 0.0)

  def body(step: Array, carry: tuple[Any, Scored]) -> tuple[Any, Scored]:
    entries, results = carry
    piece = busy[step]
    start, count = starts[piece], counts[piece]
    ids, aims = (v[piece] for v in cut)
    # A sequence begins as an empty slot does.
    entries = tuple(
      entry if kind in _ATTEND else jax.tree.map(lambda v: jnp.where(start == 0, 0, v), entry)
      for kind, entry in zip(config.pattern, entries, strict=True)
    )
    run = run_chunk(params, config, entries, jnp.int32(0), ids, start, count)

    def token(i: Array, scores: tuple[Array, ...]) -> tuple[Array, ...]:
      logits = read_out(params, config, run.hidden[i], count)
      scaled, normalizer, entropy = _distribution(logits, divisor)
      found = scaled[aims[i]] - normalizer, entropy, normalizer
      return tuple(old.at[i].set(new) for old, new in zip(scores, found, strict=True))

    none = jnp.zeros((size,), jnp.float32)
    scores = jax.lax.fori_loop(0, count, token, (none, none, none))
    real = jnp.arange(size) < count
    found = Scored(
      jnp.where(real[:, None], run.streams, 0),
      jnp.where(real[:, None], run.hidden, 0),
      None if run.experts is None else jnp.where(real[:, None], run.experts, 0),
      *scores,
    )
    results = jax.tree.map(
      lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, piece, 0), results, found
    )
    return run.entries, results

  length = padded_length(config, time)
  entries = tuple(KINDS[kind].init_cache(config, 1, length) for kind in config.pattern)
  shapes = chunk_shapes(params, config, entries)
  empty = jnp.zeros((pieces, size), jnp.float32)
  streams, hidden, experts = jax.tree.map(
    lambda s: jnp.zeros((pieces, *s.shape), s.dtype),
    (shapes.streams, shapes.hidden, shapes.experts),
  )
  results = Scored(streams, hidden, experts, empty, empty, empty)
  _, results = jax.lax.fori_loop(0, jnp.sum(counts > 0), body, (entries, results))

  def rows(v: Array) -> Array:
    """[pieces, *lead, C, *rest] to [*lead, B, T, *rest]."""
    if v.ndim > 3:
      return jnp.moveaxis(v, 0, 1).reshape(v.shape[1], batch, time, *v.shape[3:])
    return v.reshape(batch, time, *v.shape[2:])

  return jax.tree.map(rows, results)


def chunk_shapes(params: DecodeParams, config: ModelConfig, entries: tuple[Any, ...]) -> ChunkRun:
  """Shapes and dtypes of what ``run_chunk`` gives."""
  zero = jnp.int32(0)
  ids = jnp.zeros((config.exact_chunk,), jnp.int32)
  return jax.eval_shape(
    lambda p, e: run_chunk(p, config, e, zero, ids, zero, zero), params, entries
  )


def padded_length(config: ModelConfig, length: int) -> int:
  """The next length that holds whole chunks and, with these, whole blocks of keys."""
  if not config.exact_chunk:
    return length
  for size in (config.exact_chunk, config.attention_block):
    length = -(-length // size) * size
  return length
