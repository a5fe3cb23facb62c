"""One compiled computation for sampling and training, so that both see the same bits.

XLA rounds one formula in more than one way: a matrix product by the number of its rows, a fused
multiply-add by what else stands in the loop, an exponential by its place in a vector. So the log-prob
of a token is that of the trainer only where both execute the same instructions on the same shapes.
With ``config.exact_chunk = C`` a sequence is cut on a grid of C tokens, and everything that reads
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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.blocks import KINDS, Appended
from agentjax.models.config import ModelConfig
from agentjax.models.heads import compute_logits, distribution
from agentjax.models.norm import rms_norm
from agentjax.models.stack import DecodeParams, open_stream

Array = jax.Array


class ChunkRun(NamedTuple):
  """Result of ``run_chunk``; what stands at padding means nothing.

  Attributes:
    streams: [blocks, C, embed], the residual stream after every block.
    hidden: [C, embed], after the last norm.
    entries: of the cache, after the chunk.
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
  token_ids: Int[Array, " chunk"],
  start: Int[Array, ""],
  count: Int[Array, ""],
) -> ChunkRun:
  """``count`` tokens of one sequence from place ``start`` on, a multiple of C.

  Args:
    params: from ``prepare_decode_params``.
    config: with ``exact_chunk = C``.
    entries: of a cache of one slot, at ``start``.
    token_ids: [C], right-padded.
    start: tokens before these.
    count: tokens that are not padding, at least 1.
  """
  x, _ = open_stream(params, config, token_ids[None])
  appended = Appended(
    rows=jnp.zeros((1,), jnp.int32),
    positions=start + jnp.arange(config.exact_chunk)[None],
    counts=count[None],
  )
  after, streams, routed = [], [], []
  for kind, block, entry in zip(config.pattern, params.blocks, entries, strict=True):

    def run(block: Any, x: Array, entry: Any, appended: Appended, kind: str = kind) -> Any:
      return KINDS[kind].extend(block, x, entry, config, appended, None)

    x, entry, experts = _apart(count > 0, run, block, x, entry, appended)
    after.append(entry)
    streams.append(x[0])
    routed += [] if experts is None else [experts[0]]
  norm = functools.partial(rms_norm, eps=config.norm_eps)
  hidden = _apart(count > 0, norm, x, params.final_norm)[0]
  return ChunkRun(
    jnp.stack(streams), hidden, tuple(after), jnp.stack(routed) if routed else None
  )


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
    entries = jax.tree.map(lambda v: jnp.where(start == 0, 0, v), entries)
    run = run_chunk(params, config, entries, ids, start, count)

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

  entries = tuple(KINDS[kind].init_cache(config, 1, padded_length(config, time)) for kind in
                  config.pattern)
  shapes = jax.eval_shape(
    lambda: run_chunk(params, config, entries, cut[0][0], starts[0], counts[0])
  )
  empty = jnp.zeros((pieces, size), jnp.float32)
  results = Scored(
    *(
      None if s is None else jnp.zeros((pieces, *s.shape), s.dtype)
      for s in (shapes.streams, shapes.hidden, shapes.experts)
    ),
    empty,
    empty,
    empty,
  )
  _, results = jax.lax.fori_loop(0, jnp.sum(counts > 0), body, (entries, results))

  def rows(v: Array) -> Array:
    """[pieces, *lead, C, *rest] to [*lead, B, T, *rest]."""
    if v.ndim > 3:
      return jnp.moveaxis(v, 0, 1).reshape(v.shape[1], batch, time, *v.shape[3:])
    return v.reshape(batch, time, *v.shape[2:])

  return jax.tree.map(rows, results)


def padded_length(config: ModelConfig, length: int) -> int:
  """The next length that holds whole chunks, and whole blocks of keys of ``attend_cache``."""
  size = config.exact_chunk
  if not size:
    return length
  return -(-length // size) * size + config.attention_block
