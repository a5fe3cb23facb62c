"""Drafts from a context's own ids: what came after the same words before may come again.

Prompt lookup (Saxena, 2023; also Yang et al., 2304.04487): the last ``NGRAM`` tokens are searched
in what the slot holds, longest match first and latest place first, and what followed there is the
draft. Whether a draft is taken is decided by the draws themselves (``engine.programs``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

Array = jax.Array

NGRAM = 3  # tokens that are compared at most; ours


class Drafts(NamedTuple):
  """What may come next in every slot."""

  token_ids: Int[Array, "slots draft"]
  found: Bool[Array, " slots"]  # whether anything spoke for them


def lookup(
  history: Int[Array, "slots length"], counts: Int[Array, " slots"], tokens: int
) -> Drafts:
  """Drafts of the next ``tokens`` tokens.

  Where a match lies so near the end that its continuation runs out, it is read on from its start:
  a loop goes on as a loop.

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
    # Place p ends a match of so many tokens where each of them equals one at the end.
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
  """The history with ``counts[r]`` ids from ``starts[r]`` on in slot ``rows[r]``."""
  time = jnp.arange(token_ids.shape[1])
  place = jnp.where(time < counts[:, None], starts[:, None] + time, history.shape[1])
  return history.at[rows[:, None], place].set(token_ids, mode="drop")
