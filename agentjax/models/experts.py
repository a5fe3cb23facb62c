"""Products of tokens with the experts they visit: sorted by expert, in the way a platform is fast.

An expert id equal to the number of experts means none: nothing is computed, the result is zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.config import Activation
from agentjax.models.linear import Adapted, batched, precision, summed
from agentjax.models.mlp import activate
from agentjax.models.spec import Weight

Array = jax.Array

_TILE = 512  # rows of one product in the gradient of sorted experts; ours


@flax.struct.dataclass
class Experts:
  """Weights of feed-forward experts in the compute dtype; ``gate`` is None for squared ReLU."""

  up: Weight  # [experts, in, hidden]
  gate: Weight | None  # [experts, in, hidden]
  down: Weight  # [experts, hidden, in]
  activation: Activation = flax.struct.field(pytree_node=False)


def weighted_sum(
  experts: Experts,
  tokens: Float[Array, "tokens in"],
  ids: Int[Array, "tokens choices"],
  gates: Float[Array, "tokens choices"],
  block: int,
) -> Float[Array, "tokens in"]:
  """``sum_j gates_j f_{ids_j}(token)``.

  All experts run on all tokens where that is not much more work than what the tokens chose; else,
  and on TPU always, rows are sorted by expert (see ``each_row``).

  Args:
    block: rows of one product, but on TPU.
  """

  def in_blocks(experts: Experts, tokens: Array, ids: Array, gates: Array) -> Array:
    if _every_expert_is_cheaper(ids, experts.up.shape[0], block):
      return _all_experts(experts, tokens, ids, gates)
    return _sum_of_rows(functools.partial(_in_blocks, block=block), experts, tokens, ids, gates)

  return jax.lax.platform_dependent(
    experts,
    tokens,
    ids,
    gates,
    tpu=functools.partial(_sum_of_rows, _ragged),
    default=in_blocks,
  )


def of_tokens(experts: Experts, how: Callable[[Array], Array]) -> Experts:
  """The experts for other rows: ``how`` makes their ``Adapted.rows`` of those before."""

  def move(weight: Weight) -> Weight:
    if not isinstance(weight, Adapted) or weight.rows is None:
      return weight
    return dataclasses.replace(weight, rows=how(weight.rows))

  gate = None if experts.gate is None else move(experts.gate)
  return dataclasses.replace(experts, up=move(experts.up), gate=gate, down=move(experts.down))


def each_row(
  experts: Experts, rows: Float[Array, "rows in"], ids: Int[Array, " rows"], block: int
) -> Float[Array, "rows in"]:
  """``f_{ids}(row)`` for one expert a row, in the order the rows come.

  Rows are sorted by expert, then multiplied by ``jax.lax.ragged_dot`` on TPU; elsewhere, where XLA
  makes of it a product of every expert with every row, in blocks of ``block`` rows that share one
  expert. The platform is that which the program is lowered for, whatever machine lowers it.
  """
  return jax.lax.platform_dependent(
    experts, rows, ids, tpu=_ragged, default=functools.partial(_in_blocks, block=block)
  )


def permute(
  x: Float[Array, "n width"], source: Int[Array, " m"], place: Int[Array, " n"]
) -> Float[Array, "m width"]:
  """``x[source]``, zeros where that is out of range.

  Args:
    source: row of x that goes to each place, none twice.
    place: the inverse, out of range for rows that go nowhere. It makes the gradient a gather too.
  """
  return _permute(x, source, place)


def _every_expert_is_cheaper(ids: Array, num_experts: int, block: int) -> bool:
  """Whether sorting saves less than half of the rows that all experts on all tokens take."""
  return 2 * _num_blocks(ids.size, num_experts, block) * block > ids.shape[0] * num_experts


def _all_experts(experts: Experts, tokens: Array, ids: Array, gates: Array) -> Array:
  """Every expert on every token, weighted by its gate, which is 0 where it was not chosen."""
  chosen = jax.nn.one_hot(ids, experts.up.shape[0], dtype=jnp.float32)
  spread = jnp.sum(chosen * gates[..., None], axis=1).astype(tokens.dtype)
  gate = None if experts.gate is None else _into_all(tokens, experts.gate)
  hidden = activate(_into_all(tokens, experts.up), gate, experts.activation) * spread[..., None]
  return _out_of_all(hidden, experts.down)


def _into_all(tokens: Array, weight: Weight) -> Array:
  """[tokens, in] by [experts, in, hidden] to [tokens, experts, hidden]."""
  return summed(tokens, weight, "td,edf->tef", ("td,edr->ter", "ter,erf->tef"))


def _out_of_all(hidden: Array, weight: Weight) -> Array:
  """[tokens, experts, hidden] by [experts, hidden, in], summed over experts to [tokens, in]."""
  return summed(hidden, weight, "tef,efd->td", ("tef,efr->ter", "ter,erd->td"))


def _sum_of_rows(
  run: Callable[[Experts, Array, Array], Array],
  experts: Experts,
  tokens: Array,
  ids: Array,
  gates: Array,
) -> Array:
  repeat = functools.partial(jnp.repeat, repeats=ids.shape[1], axis=0)
  rows, experts = repeat(tokens), of_tokens(experts, repeat)
  out = run(experts, rows, ids.reshape(-1)).reshape(*ids.shape, -1)
  return jnp.sum(out * gates[..., None].astype(tokens.dtype), axis=1)


def _ragged(experts: Experts, rows: Array, ids: Array) -> Array:
  num_experts = experts.up.shape[0]
  order = jnp.argsort(ids, stable=True)
  place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
  ends = jnp.searchsorted(ids[order], jnp.arange(num_experts, dtype=ids.dtype), side="right")
  sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
  # What a product leaves behind the last group is not specified; nor is its gradient.
  visits = (jnp.arange(order.size) < ends[-1])[:, None]
  product = functools.partial(_grouped, sizes=sizes)
  inputs = jnp.where(visits, permute(rows, order, place), 0)
  experts = of_tokens(experts, lambda own: own[order])
  gate = None if experts.gate is None else product(inputs, experts.gate)
  hidden = activate(product(inputs, experts.up), gate, experts.activation)
  hidden = jnp.where(visits, hidden, 0)
  return permute(jnp.where(visits, product(hidden, experts.down), 0), place, order)


def _grouped(rows: Array, weight: Weight, sizes: Array) -> Array:
  """``rows @ weight[e]`` for ``sizes[e]`` rows, one expert behind the other; then unspecified."""
  if not isinstance(weight, Adapted):
    return _grouped_product(rows, weight.astype(rows.dtype), sizes)
  base = jax.lax.ragged_dot(
    rows, weight.base.astype(rows.dtype), sizes, precision=precision(rows.dtype)
  )
  narrow = weight.scaled(_grouped_product(rows, weight.a, sizes))
  return base + _grouped_product(narrow, weight.b, sizes)


@jax.custom_vjp
def _grouped_product(rows: Array, weights: Array, sizes: Array) -> Array:
  """``_grouped`` of an array."""
  return jax.lax.ragged_dot(rows, weights, sizes, precision=precision(rows.dtype))


def _grouped_forward(
  rows: Array, weights: Array, sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
  return _grouped_product(rows, weights, sizes), (rows, weights, sizes)


def _grouped_backward(
  kept: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
  rows, weights, sizes = kept
  to_rows = _grouped_product(gradient, jnp.swapaxes(weights, 1, 2), sizes)
  return to_rows, _gradient_of_weights(rows, gradient, weights, sizes), None


_grouped_product.defvjp(_grouped_forward, _grouped_backward)


def _gradient_of_weights(rows: Array, gradient: Array, weights: Array, sizes: Array) -> Array:
  """``rowsᵀ gradient`` within each expert's rows, summed in float32.

  A loop over tiles of rows, once for every expert with rows in the tile. The derivative of
  ``ragged_dot`` says the same, but the TPU compiler that belongs to jax 0.10 makes of it a product
  of all rows for every expert.
  """
  tile = min(_TILE, rows.shape[0])
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  first_tile = starts // tile
  tiles = jnp.where(sizes > 0, (ends - 1) // tile - first_tile + 1, 0)
  last_step = jnp.cumsum(tiles)

  def body(step: Array, sums: Array) -> Array:
    expert = jnp.searchsorted(last_step, step, side="right")
    begin = (first_tile[expert] + step - (last_step - tiles)[expert]) * tile
    at = jnp.minimum(begin, rows.shape[0] - tile)  # the last tile reaches back
    index = at + jnp.arange(tile)
    inside = (index >= jnp.maximum(begin, starts[expert])) & (index < ends[expert])
    left, right = (
      jnp.where(inside[:, None], jax.lax.dynamic_slice_in_dim(v, at, tile), 0)
      for v in (rows, gradient)
    )
    part = jnp.matmul(
      left.T, right, precision=precision(rows.dtype), preferred_element_type=jnp.float32
    )
    return sums.at[expert].add(part)

  # A sum of nothing differs between devices as rows do, which shard_map asks of a loop's start.
  zeros = jnp.full(weights.shape, jnp.sum(rows[:0], dtype=jnp.float32))
  return jax.lax.fori_loop(0, last_step[-1], body, zeros).astype(weights.dtype)


def _num_blocks(rows: int, num_experts: int, block: int) -> int:
  """Blocks that hold any split of ``rows`` over the experts, each expert in its own."""
  return min(-(-rows // block) + num_experts - 1, rows)


def _in_blocks(experts: Experts, rows: Array, ids: Array, block: int) -> Array:
  num_experts = experts.up.shape[0]
  blocks = _num_blocks(ids.size, num_experts, block)
  chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.int32)
  rank = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=1)
  last_block = jnp.cumsum(-(-jnp.sum(chosen, axis=0) // block))
  first_block = jnp.concatenate([jnp.zeros((1,), jnp.int32), last_block[:-1]])
  start = first_block[jnp.minimum(ids, num_experts - 1)] * block
  place = jnp.where(ids < num_experts, start + rank, blocks * block)
  source = jnp.full((blocks * block,), ids.size, jnp.int32)
  source = source.at[place].set(jnp.arange(ids.size, dtype=jnp.int32), mode="drop")
  expert = jnp.minimum(
    jnp.searchsorted(last_block, jnp.arange(blocks), side="right"), num_experts - 1
  )
  inputs = permute(rows, source, place).reshape(blocks, block, -1)
  experts = of_tokens(
    experts,
    lambda own: own.at[source].get(mode="fill", fill_value=0).reshape(blocks, block, -1),
  )
  gate = None if experts.gate is None else batched(inputs, experts.gate[expert])
  hidden = activate(batched(inputs, experts.up[expert]), gate, experts.activation)
  out = batched(hidden, experts.down[expert]).reshape(blocks * block, -1)
  return permute(out, place, source)


@jax.custom_vjp
def _permute(x: Array, source: Array, place: Array) -> Array:
  del place
  return x.at[source].get(mode="fill", fill_value=0)


def _permute_forward(x: Array, source: Array, place: Array) -> tuple[Array, tuple[Array, Array]]:
  return _permute(x, source, place), (source, place)


def _permute_backward(indices: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
  source, place = indices
  return _permute(gradient, place, source), None, None


_permute.defvjp(_permute_forward, _permute_backward)
