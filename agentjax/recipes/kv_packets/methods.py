"""Ways to have documents in a context: computed there, or apart and then in part again.

Each gives slots that hold preamble and documents, so that they can be compared with each other:

* ``whole``: every token sees all before it; nothing is reused.
* ``joined``: preamble and documents as they were computed by themselves; nothing is computed again.
  Without an adapter that is block attention, with one a KV packet.
* ``with_first_tokens`` (EPIC, 2410.15332): the first tokens of each document are computed again.
* ``with_changed_tokens`` (CacheBlend, 2405.16444): the tokens whose keys and values at the second
  attention layer differ most from those that were computed apart.

The last two are of attention alone: nobody says what a recurrent layer is to make of single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.config import check
from agentjax.models.blocks import KINDS, Appended
from agentjax.models.cache import HELD, Cache, extend, init_cache, run_section
from agentjax.models.config import ModelConfig
from agentjax.models.passes import DecodeSection
from agentjax.models.pieces import join_rows, run_rows
from agentjax.models.stack import DecodeParams, given_to_blocks, open_stream
from agentjax.recipes.kv_packets.adapter import Adapter, with_adapter, wrapped
from agentjax.recipes.kv_packets.questions import Questions

Array = jax.Array


class Part(NamedTuple):
  """The preamble or one document of each question, computed by itself."""

  entries: tuple[Any, ...]  # [questions, ...]
  length: int


def parts(
  params: DecodeParams,
  config: ModelConfig,
  questions: Questions,
  adapter: Adapter | None = None,
) -> list[Part]:
  """The preamble, as it is, and each document, with the adapter around it."""
  count, documents = questions.documents.shape[1], questions.documents
  own = params
  if adapter is not None:
    own = with_adapter(params, adapter)
    documents = wrapped(documents, adapter, config.vocab_size)
  found = [_part(params, config, questions.preamble)]
  rows = _part(own, config, documents.reshape(-1, documents.shape[-1]))
  for i in range(count):
    entries = jax.tree.map(lambda v, i=i: v.reshape(-1, count, *v.shape[1:])[:, i], rows.entries)
    found.append(Part(entries, rows.length))
  return found


def whole(params: DecodeParams, config: ModelConfig, questions: Questions, room: int) -> Cache:
  """Everything in one run, with room for ``room`` tokens behind it."""
  ids = questions.context
  slots, time = ids.shape
  empty = init_cache(config, slots, time + room)
  return extend(params, config, empty, jnp.arange(slots), ids, jnp.full(slots, time)).cache


def joined(params: DecodeParams, config: ModelConfig, made: Sequence[Part], room: int) -> Cache:
  """Parts in a row, with room for ``room`` tokens behind them."""
  lengths = [part.length for part in made]
  return join_rows(params, config, [part.entries for part in made], lengths, sum(lengths) + room)


def with_first_tokens(
  params: DecodeParams,
  config: ModelConfig,
  made: Sequence[Part],
  questions: Questions,
  room: int,
  *,
  tokens: int,
) -> Cache:
  """``joined``, with the first ``tokens`` of each document computed where they stand."""
  cache = joined(params, config, made, room)
  _check_attends(config, cache)
  slots, count, length = questions.documents.shape
  starts = questions.preamble.shape[1] + length * jnp.arange(count)
  at = (starts[:, None] + jnp.arange(min(tokens, length))).reshape(-1)
  at = jnp.broadcast_to(at, (slots, len(at)))
  ids = jnp.take_along_axis(questions.context, at, axis=1)
  _, blocks = _again(params, config, cache.blocks, open_stream(params, config, ids)[0], at)
  return Cache(blocks=blocks, lengths=cache.lengths)


def with_changed_tokens(
  params: DecodeParams,
  config: ModelConfig,
  made: Sequence[Part],
  questions: Questions,
  room: int,
  *,
  share: float,
) -> Cache:
  """``joined``, with a share of its tokens computed where they stand.

  All tokens run up to the second attention layer; those are chosen whose keys and values differ
  most there, by the sum of squares over heads and channels. The later layers run these alone.
  """
  cache = joined(params, config, made, room)
  _check_attends(config, cache)
  second = [i for i, entry in enumerate(cache.blocks) if isinstance(entry, HELD)][1:2]
  if not second:
    return cache  # one attention layer reads embeddings, which no context changes
  cut, ids = second[0], questions.context
  at = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  x, first = _again(params, config, cache.blocks[:cut], open_stream(params, config, ids)[0], at)
  _, probe = _again(params, config, cache.blocks[cut : cut + 1], x, at, begin=cut)
  changed = _apart(probe[0], cache.blocks[cut])[:, : ids.shape[1]]
  chosen = jax.lax.top_k(changed, max(1, round(share * ids.shape[1])))[1]
  at = jnp.sort(chosen, axis=1)
  x = jnp.take_along_axis(x, at[..., None], axis=1)
  _, rest = _again(params, config, cache.blocks[cut:], x, at, begin=cut)
  return Cache(blocks=(*first, *rest), lengths=cache.lengths)


def _part(params: DecodeParams, config: ModelConfig, ids: Int[Array, "rows time"]) -> Part:
  rows, time = ids.shape
  return Part(run_rows(params, config, ids, jnp.full(rows, time)), time)


def _check_attends(config: ModelConfig, cache: Cache) -> None:
  pairs = zip(config.pattern, cache.blocks, strict=True)
  found = {kind for kind, entry in pairs if not (entry is None or isinstance(entry, HELD))}
  other = sorted(found | {kind for kind in config.pattern if KINDS[kind].reads_tokens})
  check(not other, "model.pattern", config.pattern, f"none of {', '.join(other)}: see ``methods``")


def _again(
  params: DecodeParams,
  config: ModelConfig,
  entries: tuple[Any, ...],
  x: Float[Array, "slots time embed"],
  at: Int[Array, "slots time"],
  *,
  begin: int = 0,
) -> tuple[Array, tuple[Any, ...]]:
  """Runs tokens at these places of all slots through blocks ``begin`` on, one for each entry."""
  end = begin + len(entries)
  given = given_to_blocks(config, None, None)[begin:end]
  section = DecodeSection(config.pattern[begin:end], params.blocks[begin:end], entries, given)
  slots, time = at.shape
  where = Appended(jnp.arange(slots), at, jnp.full(slots, time))
  x, entries, _ = run_section(x, section, config=config, where=where)
  return x, entries


def _apart(one: Any, other: Any) -> Float[Array, "slots length"]:
  """Squared distances of what two entries hold of each token."""

  def square(a: Array, b: Array) -> Array:
    apart = jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32))
    between = tuple(range(1, a.ndim - 2))
    return jnp.sum(apart, axis=(*between, a.ndim - 1))

  squares = jax.tree.leaves(jax.tree.map(square, one, other))
  return jnp.sum(jnp.stack(squares), axis=0)
