"""Drafts from a context's own ids: what followed the same tokens before may follow again.

Prompt lookup (Saxena, 2023; also Yang et al., 2304.04487): the last ``NGRAM`` tokens are searched
in the slot's ids, the longest match first, then the latest. What followed there is the draft. The
draws decide whether a draft is taken (``engine.decoding``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

Array = jax.Array

NGRAM = 3  # tokens that are compared at most; ours


class Drafts(NamedTuple):
  """What may come next in each slot."""

  token_ids: Int[Array, "slots draft"]
  found: Bool[Array, " slots"]  # whether there was a match


def lookup(
  history: Int[Array, "slots length"], counts: Int[Array, " slots"], tokens: int
) -> Drafts:
  """Drafts of the next ``tokens`` tokens.

  If the continuation of a match reaches the end of the ids, it is read again from its start: a loop
    goes on as a loop.

  Args:
    history: ids of every slot; those from ``counts`` on mean nothing.
    counts: tokens of every slot, at least 1.
    tokens: of a draft.
  """
  length = history.shape[1]
  place = jnp.arange(length)
  last = counts[:, None] - 1
  same = jnp.ones(history.shape, bool)
  matched = jnp.zeros(history.shape, jnp.int32)
  for back in range(NGRAM):
    # ``matched[p]``: how many tokens up to place p equal the last ones.
    wanted = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
    there = jnp.roll(history, back, axis=1)
    same &= (there == wanted) & (place >= back) & (last >= back)
    matched += same
  score = jnp.where(place < last, matched * length + place, -1)
  best = jnp.argmax(score, axis=1)[:, None]
  found = jnp.take_along_axis(score, best, axis=1)[:, 0] >= length
  period = jnp.maximum(last - best, 1)
  ahead = best + 1 + jnp.arange(tokens) % period
  drafts = jnp.take_along_axis(history, jnp.minimum(ahead, length - 1), axis=1)
  return Drafts(jnp.where(found[:, None], drafts, 0), found)


def written(
  history: Int[Array, "slots length"],
  rows: Int[Array, " rows"],
  starts: Int[Array, " rows"],
  token_ids: Int[Array, "rows time"],
  counts: Int[Array, " rows"],
) -> Int[Array, "slots length"]:
  """The history with ``counts[r]`` ids set from ``starts[r]`` on in slot ``rows[r]``."""
  time = jnp.arange(token_ids.shape[1])
  place = jnp.where(time < counts[:, None], starts[:, None] + time, history.shape[1])
  return history.at[rows[:, None], place].set(token_ids, mode="drop")
