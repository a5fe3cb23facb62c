"""Rows cut along time over a mesh axis: what a shard needs of the ones before it.

A shard is a run of ``time / shards`` consecutive tokens of every row; sequences and their ids go on
across the cuts. Values and gradients are those of uncut rows, but for the order of sums.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.products import precision
from agentjax.sharding import LOGICAL_AXES, index, ways
from pallas_kernels import segments

Array = jax.Array

# Finite: exp gives exactly 0, and the gradient of what is masked is 0 and not NaN.
_MASKED = -1e30


def incoming_tail(
  x: Float[Array, "batch time channels"], segment_ids: Int[Array, "batch time"], size: int
) -> Float[Array, "batch size channels"]:
  """The last ``size`` inputs of the shard before, 0 where they are of another sequence.

  Args:
    x: [B, T, C], the shard's inputs.
    segment_ids: [B, T], of the shard; 0 on padding.
    size: tokens, at most T.

  Raises:
    ValueError: a shard shorter than ``size``.
  """
  if ways("time") == 1:
    return jnp.zeros((x.shape[0], size, x.shape[2]), x.dtype)
  if x.shape[1] < size:
    raise ValueError(
      f"a convolution over {size + 1} tokens needs at least {size} tokens a shard, got "
      f"{x.shape[1]}. Lower config.mesh.context or use longer rows."
    )
  tail, ids = _from_previous(x[:, -size:]), _from_previous(segment_ids[:, -size:])
  first = segment_ids[:, :1]
  return jnp.where(((ids == first) & (first != 0))[..., None], tail, 0)


def incoming_state(
  x: Float[Array, "batch time heads width"],
  dt: Float[Array, "batch time heads"],
  a: Float[Array, " heads"],
  b: Float[Array, "batch time groups state"],
  segment_ids: Int[Array, "batch time"],
) -> Float[Array, "batch heads width state"] | None:
  """State of ``ssd`` before the shard's first token; None where time is not split.

  Every shard computes ``S = sum_t exp(sum_{s>t} dt_s a) dt_t x_t b_tᵀ`` of its last sequence and
  ``D = exp(sum_t dt_t a)``, which is 0 unless its only sequence came in from the shard before. With
  all shards' D and S at hand, ``F_i = D_i F_{i-1} + S_i`` is the state after shard i.

  Args:
    x, dt, a, b: see ``pallas_kernels.ssd.api.ssd``.
    segment_ids: [B, T]; 0 on padding, which neither decays a state nor adds to it.
  """
  if ways("time") == 1:
    return None
  batch, _, heads, width = x.shape
  groups, size = b.shape[2:]
  dt = jnp.where((segment_ids != 0)[..., None], dt, 0.0)
  rate = dt * a
  resets = segments.starts(segment_ids)
  later = jnp.flip(jnp.cumsum(jnp.flip(rate, 1), axis=1), 1)
  later = jnp.pad(later[:, 1:], ((0, 0), (0, 1), (0, 0)))
  runs = jnp.cumsum(resets, axis=1)
  is_last = (runs == runs[:, -1:])[..., None]
  inputs = (jnp.exp(jnp.where(is_last, later, _MASKED)) * dt)[..., None] * x
  state = jnp.einsum(
    "btghp,btgn->bghpn",
    inputs.reshape(*dt.shape[:2], groups, heads // groups, width),
    b.astype(inputs.dtype),
    precision=precision(x.dtype),
  ).reshape(batch, heads, width, size)
  continues = _continues(segment_ids)
  through = continues & ~jnp.any(resets, axis=1)
  decay = jnp.exp(jnp.where(through[:, None], jnp.sum(rate, axis=1), _MASKED))

  decays, states = (jax.lax.all_gather(v, LOGICAL_AXES["time"]) for v in (decay, state))

  def pass_on(entering: Array, shard: tuple[Array, Array]) -> tuple[Array, Array]:
    decay, state = shard
    return decay[..., None, None] * entering + state, entering

  _, entering = jax.lax.scan(pass_on, jnp.zeros_like(state), (decays, states))
  return jnp.where(continues[:, None, None, None], entering[index("time")], 0.0)


def _continues(segment_ids: Array) -> Bool[Array, " batch"]:
  """Whether the shard's first token goes on with the sequence that the shard before ends in."""
  before = _from_previous(segment_ids[:, -1])
  return (before == segment_ids[:, 0]) & (before != 0)


def _from_previous(x: Array) -> Array:
  """What the shard before holds; zeros in the first."""
  shards = ways("time")
  return jax.lax.ppermute(x, LOGICAL_AXES["time"], [(i, i + 1) for i in range(shards - 1)])
