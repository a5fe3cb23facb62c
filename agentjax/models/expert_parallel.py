"""Experts over the devices of a mesh: each token's row travels to the owner of its expert and back.

The ``expert`` mesh axis splits the rows of the batch and the experts. A device sends the rows of
its own tokens to the devices that hold their experts, through buffers of a fixed size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.experts import Experts, each_row, of_tokens, permute, weighted_sum
from agentjax.models.linear import Adapted
from agentjax.models.narrow import Narrow
from agentjax.models.spec import Weight
from agentjax.sharding import LOGICAL_AXES, constrain

Array = jax.Array

_TOKENS = PartitionSpec(LOGICAL_AXES["batch"], LOGICAL_AXES["time"], None)
_INTO = PartitionSpec(*(LOGICAL_AXES[axis] for axis in ("experts", "embed", "expert_mlp")))
_OUT_OF = PartitionSpec(*(LOGICAL_AXES[axis] for axis in ("experts", "expert_mlp", "embed")))
_SPLITS = (*LOGICAL_AXES["batch"], *LOGICAL_AXES["time"])  # mesh axes with tokens of their own
(_OWNERS,), (_SUMMED,) = (LOGICAL_AXES[axis] for axis in ("experts", "expert_mlp"))
_GATHERED = LOGICAL_AXES["embed"]
_COPIED = tuple(axis for axis in _SPLITS if axis not in (_OWNERS, *_GATHERED))


def sharded_sum(
  experts: Experts,
  x: Float[Array, "batch *time in"],
  ids: Int[Array, "batch *time choices"],
  gates: Float[Array, "batch *time choices"],
  config: ModelConfig,
) -> tuple[Float[Array, "batch *time in"], Float[Array, ""]]:
  """``sum_j gates_j f_{ids_j}(x)`` over the mesh of ``jax.set_mesh``, and the choices dropped.

  Weights are gathered over ``fsdp`` and ``context`` where they are used and stay split over
  ``expert`` and ``tensor``. Between each two devices of the ``expert`` axis there is room for
  ``min(k, experts a device holds)`` rows per token, which every choice fits into, or for
  ``config.expert_capacity`` times the rows of balance, ``tokens k / devices``. Choices that do not
  fit add zero: a token's other gates stay as they are. The first to be left out are last choices,
  and among equal ones those of later tokens.

  Args:
    experts: in the compute dtype.
    x: rows split over the axes of a batch; without an axis of time they are one token each.
    ids: the number of experts means none; a token names no other expert twice.

  Returns:
    The sums, laid out as x; float32 scalar, the choices of all devices that were left out.

  Raises:
    ValueError: rows or time that the mesh does not divide. Adapters of several policies travel to
      no other device: the engine refuses them where the ``expert`` axis has several.
  """
  rows = [v.reshape(v.shape[0], -1, v.shape[-1]) for v in (x, ids, gates)]
  rows[0] = constrain(rows[0], ("batch", "time", "stream"), name="the input of the experts")
  parts = dataclasses.replace(
    experts,
    up=_split(experts.up, _INTO),
    gate=None if experts.gate is None else _split(experts.gate, _INTO),
    down=_split(experts.down, _OUT_OF),
  )
  run = jax.shard_map(
    functools.partial(_local_sum, config=config),
    in_specs=(parts, _TOKENS, _TOKENS, _TOKENS),
    out_specs=(_TOKENS, PartitionSpec()),
  )
  out, dropped = run(experts, *rows)
  return out.reshape(x.shape), dropped


def _split(weight: Weight, spec: PartitionSpec) -> Any:
  """How a weight is split; its factors, where it is adapted, along the axes that they share."""
  if isinstance(weight, Narrow):
    scales = PartitionSpec(spec[0], None, spec[2])
    return dataclasses.replace(weight, numbers=spec, scales=scales)
  if not isinstance(weight, Adapted):
    return spec
  return dataclasses.replace(
    weight,
    base=_split(weight.base, spec),
    a=PartitionSpec(*spec[:2], None),
    b=PartitionSpec(spec[0], None, spec[2]),
    rows=None if weight.rows is None else PartitionSpec(LOGICAL_AXES["batch"], None),
  )


def _local_sum(
  experts: Experts, x: Array, ids: Array, gates: Array, *, config: ModelConfig
) -> tuple[Array, Array]:
  """One device's part: its tokens, its slice of the experts' hidden units."""

  def gather(weight: Weight, axis: int) -> Weight:
    if isinstance(weight, Adapted):
      # One factor has the axis that is gathered, the other that of the hidden units.
      outer, inner = ("a", "b") if axis == 1 else ("b", "a")
      copied = jax.lax.pcast(getattr(weight, outer), _SUMMED, to="varying")
      whole = jax.lax.pcast(getattr(weight, inner), (*_COPIED, *_GATHERED), to="varying")
      parts = {"base": gather(weight.base, axis), outer: gather(copied, axis), inner: whole}
      return dataclasses.replace(weight, **parts)
    if isinstance(weight, Narrow):
      scales = weight.scales
      if axis == 1:  # that of the inputs, which share their scales
        scales = jax.lax.pcast(scales, (*_COPIED, *_GATHERED), to="varying")
      else:
        scales = gather(scales, axis)
      return dataclasses.replace(weight, numbers=gather(weight.numbers, axis), scales=scales)
    # Copies along the axes that do not split weights, here so that gradients are summed as shards.
    weight = jax.lax.pcast(weight, _COPIED, to="varying")
    return jax.lax.all_gather(weight, _GATHERED, axis=axis, tiled=True)

  experts = dataclasses.replace(
    experts,
    up=gather(experts.up, 1),
    gate=None if experts.gate is None else gather(experts.gate, 1),
    down=gather(experts.down, 2),
  )
  tokens = x.reshape(-1, x.shape[-1])
  experts = of_tokens(experts, lambda own: jnp.repeat(own, len(tokens) // len(own), axis=0))
  tokens = jax.lax.pcast(tokens, _SUMMED, to="varying")
  ids, gates = (v.reshape(tokens.shape[0], -1) for v in (ids, gates))
  if jax.lax.axis_size(_OWNERS) == 1:
    out = weighted_sum(experts, tokens, ids, gates, config.expert_block)
    dropped = jnp.zeros((), jnp.float32)
  else:
    out, left_out = _exchange(experts, tokens, ids, gates, config)
    dropped = jax.lax.psum(left_out, _SPLITS)
  return jax.lax.psum(out, _SUMMED).reshape(x.shape), dropped


def _exchange(
  experts: Experts, tokens: Array, ids: Array, gates: Array, config: ModelConfig
) -> tuple[Array, Array]:
  devices, held = jax.lax.axis_size(_OWNERS), experts.up.shape[0]
  num_tokens, choices = ids.shape
  room = _room(num_tokens, choices, devices, held, config.expert_capacity)

  # (choice, token) pairs, first choices first, find their place among those to the same device.
  expert = ids.T.reshape(-1)
  owner = expert // held  # ``devices`` where there is no expert
  order = jnp.argsort(owner, stable=True)
  sorted_owner = owner[order]
  first = jnp.searchsorted(sorted_owner, jnp.arange(devices, dtype=owner.dtype))
  rank = jnp.arange(order.size) - first[jnp.minimum(sorted_owner, devices - 1)]
  fits = (sorted_owner < devices) & (rank < room)
  slot = jnp.where(fits, sorted_owner * room + rank, devices * room)
  place = jnp.zeros_like(slot).at[order].set(slot)
  source = jnp.full((devices * room,), order.size, order.dtype).at[slot].set(order, mode="drop")
  left_out = jnp.sum((sorted_owner < devices) & ~fits, dtype=jnp.float32)

  swap = functools.partial(
    jax.lax.all_to_all, axis_name=_OWNERS, split_axis=0, concat_axis=0, tiled=True
  )
  theirs = swap((expert % held).at[source].get(mode="fill", fill_value=held))
  rows = swap(permute(jnp.tile(tokens, (choices, 1)), source, place))
  rows = swap(each_row(experts, rows, theirs, config.expert_block))
  out = permute(rows, place, source).reshape(choices, num_tokens, -1)
  return jnp.sum(out * gates.T[..., None].astype(out.dtype), axis=0), left_out


def _room(tokens: int, choices: int, devices: int, held: int, capacity: float | None) -> int:
  """Rows that a device can send to another."""
  most = tokens * min(choices, held)
  if capacity is None:
    return most
  return min(most, math.ceil(capacity * tokens * choices / devices))
