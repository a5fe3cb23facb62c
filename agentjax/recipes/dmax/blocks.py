"""Rows of text in blocks: which tokens are noised, and what a noised block sees.

Tokens fall into blocks of S by their place in their sequence. A block is predicted from all its own
places, of which some are noised, and from the clean blocks before it: two copies of a row, [noisy,
clean], run as one row of twice the length (``block_sight``).

Shapes: B rows, T tokens a row, N = T / S blocks, S tokens a block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models import Sight

Array = jax.Array


class Text(NamedTuple):
  """Rows whose sequences fill whole blocks (``fill_blocks``)."""

  token_ids: Int[Array, "batch time"]
  segment_ids: Int[Array, "batch time"]
  positions: Int[Array, "batch time"]
  noise: Int[Array, "batch time"]  # 0 on tokens that are never noised, see ``noise_of``
  unknown: Bool[Array, "batch time"]  # behind a sequence that was cut off: noised and not scored
  ends: Int[Array, "batch time"]  # place in its row of the last token of the block's own


def in_blocks(x: Array, block: int) -> Array:
  """[B, T, ...] as [B, N, S, ...]."""
  return x.reshape(x.shape[0], -1, block, *x.shape[2:])


def fill_blocks(
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  noise: Int[Array, "batch time"],
  *,
  block: int,
  stop_ids: tuple[int, ...],
) -> Text:
  """Fills up the last block of every sequence with its last token.

  The fill of a sequence that ends in one of ``stop_ids`` is predicted like its last token. Behind a
  sequence that was cut off nobody knows what would have followed.

  Args:
    token_ids, segment_ids, positions: packed rows; every sequence starts at a multiple of ``block``
      in its row, and ``block`` divides T.
    noise: see ``noise_of``.
    block: S.
    stop_ids: that end a turn.
  """
  ids, segments, places, number = (
    in_blocks(x, block) for x in (token_ids, segment_ids, positions, noise)
  )
  own = segments != 0
  last = jnp.maximum(jnp.sum(own, axis=-1, keepdims=True) - 1, 0)
  filled = ~own & own[..., :1]
  end = jnp.take_along_axis(ids, last, axis=-1)
  ended = jnp.isin(end, jnp.asarray(stop_ids, ids.dtype))
  offsets = jnp.arange(block)
  starts = jnp.arange(ids.shape[1])[:, None] * block
  parts = (
    jnp.where(filled, end, ids),
    jnp.where(filled, segments[..., :1], segments),
    jnp.where(filled, places[..., :1] + offsets, places),
    jnp.where(filled & ended, jnp.take_along_axis(number, last, axis=-1), number),
    filled & ~ended,
    jnp.broadcast_to(starts + last, ids.shape),
  )
  return Text(*(x.reshape(token_ids.shape) for x in parts))


def block_sight(batch: int, time: int, block: int) -> Sight:
  """What the tokens of rows [noisy, clean] see, [B, 2 T].

  A noised token sees its noised block and the clean blocks before it. A clean token sees its clean
  block and those before it.
  """
  number = jnp.arange(time) // block
  ranks = jnp.concatenate([2 * number - 1, 2 * number])
  lanes = jnp.concatenate([1 + number, jnp.zeros_like(number)])
  return Sight(*(jnp.broadcast_to(v, (batch, 2 * time)) for v in (ranks, lanes)))


def uniform(
  text: Text, block: int, seed: int, draw: int
) -> tuple[Float[Array, "batch time"], Float[Array, "batch blocks"]]:
  """Uniform draws in [0, 1) of every token and of every block.

  They depend on ``seed``, ``draw``, the block's number of noise, its tokens and its place in its
  sequence alone: not on the row, nor on what else is in it.
  """
  ids, places, number = (in_blocks(x, block) for x in (text.token_ids, text.positions, text.noise))
  odd = 2 * jnp.arange(block, dtype=jnp.uint32) + 1
  mixed = (ids.astype(jnp.uint32) + 1) * odd * jnp.uint32(2654435761)
  content = jnp.sum(mixed, axis=-1, dtype=jnp.uint32)
  content += places[..., 0].astype(jnp.uint32) * jnp.uint32(40503)
  key = jax.random.fold_in(jax.random.key(seed), draw)

  def one(number: Array, content: Array) -> Array:
    own = jax.random.fold_in(jax.random.fold_in(key, number), content)
    return jax.random.uniform(own, (block + 1,))

  drawn = jax.vmap(jax.vmap(one))(jnp.max(number, axis=-1), content)
  return drawn[..., :block].reshape(text.token_ids.shape), drawn[..., block]


def share_mask(
  text: Text, block: int, seed: int, draw: int, share: float
) -> Bool[Array, "batch time"]:
  """Each token that may be noised is, with probability ``share``."""
  tokens, _ = uniform(text, block, seed, draw)
  return (text.noise > 0) & (tokens < share)


def subset_mask(
  text: Text, block: int, seed: int, draw: int
) -> tuple[Bool[Array, "batch time"], Float[Array, "batch time"]]:
  """In each block with n tokens that may be noised, k of them; k is uniform in 1..n.

  Returns:
    The tokens that are noised, and n / k on them, 0 on the others.
  """
  tokens, blocks = uniform(text, block, seed, draw)
  own = in_blocks(text.noise, block) > 0
  n = jnp.sum(own, axis=-1)
  k = jnp.clip(1 + jnp.floor(blocks * n).astype(n.dtype), 1, jnp.maximum(n, 1))
  order = jnp.where(own, in_blocks(tokens, block), 2.0)
  rank = jnp.argsort(jnp.argsort(order, axis=-1), axis=-1)
  chosen = own & (rank < k[..., None])
  scale = jnp.where(chosen, (n / k)[..., None], 0.0)
  return chosen.reshape(text.noise.shape), scale.reshape(text.noise.shape)
