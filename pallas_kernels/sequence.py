"""Rows cut along time over a mesh axis: what a shard needs of the ones before it.

A shard is a run of ``time / shards`` consecutive tokens of every row; sequences and their ids go on
across the cuts. To be called inside ``jax.shard_map``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array
Axis = str | tuple[str, ...]  # name of a mesh axis, or of several that cut together


def continues(segment_ids: Array | None, batch: int, axis: Axis) -> Array:
  """Whether the shard's first token goes on with the sequence that the shard before ends in.

  Args:
    segment_ids: int [B, T] of the shard, 0 at padding; None: each row is one sequence.
    batch: B.
    axis: mesh axis that cuts time.

  Returns:
    bool [B]; False in the first shard.
  """
  if segment_ids is None:
    return jnp.full((batch,), jax.lax.axis_index(axis) > 0)
  before = from_previous(segment_ids[:, -1], axis)
  return (before == segment_ids[:, 0]) & (before != 0)


def from_previous(x: Array, axis: Axis) -> Array:
  """What the shard before holds; zeros in the first."""
  shards = jax.lax.axis_size(axis)
  return jax.lax.ppermute(x, axis, [(i, i + 1) for i in range(shards - 1)])


def incoming_tail(x: Array, segment_ids: Array | None, size: int, axis: Axis) -> Array:
  """The last ``size`` inputs of the shard before, 0 where they are of another sequence.

  Args:
    x: [B, T, C], the shard's inputs.
    segment_ids: [B, T] of the shard, 0 at padding; None: each row is one sequence.
    size: tokens, at most T.
    axis: mesh axis that cuts time.

  Returns:
    [B, size, C].

  Raises:
    ValueError: a shard shorter than ``size``.
  """
  if x.shape[1] < size:
    raise ValueError(
      f"a convolution over {size + 1} tokens needs at least {size} tokens a shard, got "
      f"{x.shape[1]}. Cut time into fewer shards or use longer rows."
    )
  tail = from_previous(x[:, -size:], axis)
  if segment_ids is None:
    return tail
  ids, first = from_previous(segment_ids[:, -size:], axis), segment_ids[:, :1]
  return jnp.where(((ids == first) & (first != 0))[..., None], tail, 0)


def incoming_state(decay: Array, state: Array, goes_on: Array, axis: Axis) -> Array:
  """State before the shard's first token, from what every shard makes of an empty one.

  ``F_i = decay_i F_{i-1} + state_i`` is the state after shard i. Pairs (decay, state) compose
  associatively; here they are gathered and composed in order, on every shard alike.

  Args:
    decay: what is left of an incoming state after the shard, broadcast to the shape of ``state``;
      0 where a sequence begins inside.
    state: [B, ...] after the shard, from an empty state before it.
    goes_on: bool [B], from ``continues``; where False the state is empty.
    axis: mesh axis that cuts time.
  """
  goes_on = goes_on.reshape(-1, *[1] * (state.ndim - 1))
  decay = jnp.where(goes_on, decay, 0.0)  # a sequence may begin at the cut itself
  decays, states = (jax.lax.all_gather(v, axis) for v in (decay, state))

  def pass_on(entering: Array, shard: tuple[Array, Array]) -> tuple[Array, Array]:
    decay, state = shard
    return decay * entering + state, entering

  _, entering = jax.lax.scan(pass_on, jnp.zeros_like(state), (decays, states))
  mine = entering[jax.lax.axis_index(axis)]
  return jnp.where(goes_on, mine, 0.0)


def vary_alike(*arrays: Array | None) -> tuple[Array | None, ...]:
  """Marks each array as varying over every mesh axis that any of them varies over.

  Inside ``jax.shard_map`` the parts of a custom gradient must agree on that; elsewhere nothing is
  done.
  """
  axes = frozenset[str]().union(*(_varying(v) for v in arrays if v is not None))

  def vary(v: Array | None) -> Array | None:
    missing = () if v is None else tuple(axes - _varying(v))
    return jax.lax.pcast(v, missing, to="varying") if missing else v

  return tuple(vary(v) for v in arrays)


def _varying(v: Array) -> frozenset[str]:
  return jax.typeof(v).manual_axis_type.varying
