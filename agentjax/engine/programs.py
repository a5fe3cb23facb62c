"""The engine's compiled functions: few, of fixed shape, with the cache updated in place."""

from __future__ import annotations

import collections
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from agentjax import models
from agentjax.engine import sampling
from agentjax.engine.config import EngineConfig
from agentjax.engine.request import Chunk, DecodePlan
from agentjax.models import Cache, ModelConfig
from agentjax.trajectory.experts import compact_dtype

Array = jax.Array


@flax.struct.dataclass
class DeviceState:
  """All slots of one lane. Every dispatch consumes one and gives the next."""

  cache: Cache
  logits: Array  # float32 [slots, vocab], of the token each slot takes next


_WITHOUT_PAST = ("lengths", "logits")  # state that a model has which only attends


class Programs:
  """One jitted function a job. Shapes depend on the configs alone, never on the requests.

  ``config`` is that of one lane. ``programs_of_lane`` shares programs between engines.

  Attributes:
    prepare: training parameters to per-layer decode parameters, a copy in any case.
    extend: one function a bucket.
    decode: up to ``chunk_tokens`` tokens for all slots.
    place: empties several slots and gives them a context's state.
    write: puts keys and values into several slots.
    read: takes a context's state out of a slot.
    read_blocks: takes keys and values out of a slot.
    traces: how often each was compiled; more than once means a shape leaked in, or other devices.
    block_tokens: tokens of a block of keys and values.
    transfer_blocks: blocks that ``write`` and ``read_blocks`` move at once.
    has_blocks: whether the model has keys and values at all.
    attention_only: whether it has nothing else.
    state_bytes, block_bytes: sizes of a context's state and of one block.
  """

  def __init__(
    self, model_config: ModelConfig, config: EngineConfig, vocab_limit: int | None
  ) -> None:
    self.slots = config.slots
    self.place_width = min(self.slots, 16)
    self.traces: collections.Counter[str] = collections.Counter()
    self._in_thread = threading.local()
    self._model, self._config, self._vocab_limit = model_config, config, vocab_limit
    self.initial = self._jit("initial", self._initial)
    self.prepare = self._jit("prepare", self._prepare)
    self.decode = self._jit("decode", self._decode, donate=True)
    self.block_tokens = min(config.block_tokens, config.max_length)
    self.transfer_blocks = min(8, -(-config.max_length // self.block_tokens))
    shapes, self._time_axes = self._find_time_axes()
    timed = [axis is not None for axis in self._time_axes]
    self.has_blocks = any(timed)
    self.attention_only = timed.count(False) == len(_WITHOUT_PAST)
    per_slot = [math.prod(v.shape[1:]) * v.dtype.itemsize for v in shapes]
    self.state_bytes = sum(n for n, t in zip(per_slot, timed, strict=True) if not t)
    in_time = sum(n for n, t in zip(per_slot, timed, strict=True) if t)
    self.block_bytes = in_time * self.block_tokens // config.max_length
    self.place = self._jit("place", self._place, donate=True)
    self.write = self._jit("write", self._write, donate=True)
    self.read = self._jit("read", self._read)
    self.read_blocks = self._jit("read_blocks", self._read_blocks)
    self.extend = {
      tokens: self._jit(f"extend_{rows}x{tokens}", self._extend, donate=True)
      for tokens, rows in zip(config.extend_buckets, config.extend_rows, strict=True)
    }

  @property
  def traces_here(self) -> int:
    """How often something was compiled in this thread."""
    return getattr(self._in_thread, "traces", 0)

  def _jit(self, name: str, function: Callable[..., Any], *, donate: bool = False) -> Any:
    def counted(*args: Any) -> Any:
      self.traces[name] += 1
      self._in_thread.traces = self.traces_here + 1
      return function(*args)

    counted.__name__ = name
    return jax.jit(counted, donate_argnums=(0,) if donate else ())

  def _initial(self) -> DeviceState:
    return self._empty(self._config.max_length)

  def _empty(self, length: int) -> DeviceState:
    return DeviceState(
      cache=models.init_cache(self._model, self.slots, length),
      logits=jnp.zeros((self.slots, self._model.vocab_size), jnp.float32),
    )

  def _find_time_axes(self) -> tuple[list[jax.ShapeDtypeStruct], list[int | None]]:
    """Of every array of the device state its shape and its axis of time: the one that grows."""
    length = self._config.max_length
    shapes, longer = (
      jax.tree.leaves(jax.eval_shape(functools.partial(self._empty, n)))
      for n in (length, length + 1)
    )
    axes: list[int | None] = []
    for a, b in zip(shapes, longer, strict=True):
      grown = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
      axes.append(grown[0] if grown else None)
    return shapes, axes

  def _prepare(self, params: Any) -> Any:
    # Arrays that pass through unchanged would be shared with the trainer, which donates them.
    return jax.tree.map(jnp.copy, models.prepare_decode_params(params, self._model))

  def _extend(
    self, device: DeviceState, params: Any, rows: Array, token_ids: Array, counts: Array
  ) -> tuple[DeviceState, Array | None]:
    """``counts[r]`` tokens into slot ``rows[r]``; a row that is not used names no slot.

    Beside the state, what the routers chose, [rows, tokens, routers, choices], where recorded.
    """
    out = models.extend(params, self._model, device.cache, rows, token_ids, counts)
    logits = device.logits.at[rows].set(out.logits, mode="drop")
    return DeviceState(cache=out.cache, logits=logits), self._compact(out.experts)

  def _compact(self, experts: Array | None) -> Array | None:
    """[routers, ..., choices] with the routers behind, in few bytes; None if not recorded."""
    if experts is None or not self._config.record_experts:
      return None
    ids = self._model.num_experts + self._model.zero_experts
    return jnp.moveaxis(experts, 0, -2).astype(compact_dtype(ids))

  def _place(
    self, device: DeviceState, state: tuple[Array, ...], rows: Array, count: Array
  ) -> DeviceState:
    """Every slot of ``rows[:count]`` gets this state, and keys and values of zero.

    Zero, not what another context left there: a masked NaN would still reach a sum.
    """
    leaves, tree = jax.tree.flatten(device)
    given = iter(state)
    fills = [
      next(given) if axis is None else jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
      for leaf, axis in zip(leaves, self._time_axes, strict=True)
    ]

    def one(i: Array, leaves: list[Array]) -> list[Array]:
      return [
        jax.lax.dynamic_update_slice_in_dim(leaf, fill, rows[i], axis=0)
        for leaf, fill in zip(leaves, fills, strict=True)
      ]

    return jax.tree.unflatten(tree, jax.lax.fori_loop(0, count, one, leaves))

  def _write(
    self,
    device: DeviceState,
    blocks: tuple[tuple[Array, ...], ...],
    first: Array,
    block_count: Array,
    rows: Array,
    count: Array,
  ) -> DeviceState:
    """``blocks[:block_count]`` become blocks ``first`` and on of every slot of ``rows[:count]``."""
    leaves, tree = jax.tree.flatten(device)
    timed = [(i, axis) for i, axis in enumerate(self._time_axes) if axis is not None]
    stacked = [jnp.stack(leaf) for leaf in zip(*blocks, strict=True)]

    def one(i: Array, values: list[Array]) -> list[Array]:
      row, block = rows[i // block_count], i % block_count
      start = (first + block) * self.block_tokens
      return [
        jax.lax.dynamic_update_slice(
          value, source[block], [row, *(start if d == axis else 0 for d in range(1, value.ndim))]
        )
        for value, source, (_, axis) in zip(values, stacked, timed, strict=True)
      ]

    written = jax.lax.fori_loop(0, count * block_count, one, [leaves[i] for i, _ in timed])
    for (i, _), value in zip(timed, written, strict=True):
      leaves[i] = value
    return jax.tree.unflatten(tree, leaves)

  def _read(self, device: DeviceState, slot: Array) -> tuple[Array, ...]:
    """What a slot holds that has no axis of time."""
    return tuple(
      jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)
      for leaf, axis in zip(jax.tree.leaves(device), self._time_axes, strict=True)
      if axis is None
    )

  def _read_blocks(
    self, device: DeviceState, slot: Array, first: Array
  ) -> tuple[tuple[Array, ...], ...]:
    """Blocks ``first`` and on of a slot; the last block of a slot ends where the slot ends."""

    def block(index: int) -> tuple[Array, ...]:
      start = (first + index) * self.block_tokens
      return tuple(
        jax.lax.dynamic_slice(
          leaf,
          [slot, *(start if d == axis else 0 for d in range(1, leaf.ndim))],
          [1, *(self.block_tokens if d == axis else n for d, n in enumerate(leaf.shape) if d)],
        )
        for leaf, axis in zip(jax.tree.leaves(device), self._time_axes, strict=True)
        if axis is not None
      )

    return tuple(block(i) for i in range(self.transfer_blocks))

  def _decode(
    self, device: DeviceState, params: Any, plan: DecodePlan
  ) -> tuple[DeviceState, Chunk]:
    """Draws, feeds and records a token for every live slot until none is live."""
    filters = sampling.Filters(plan.temperature, plan.top_k, plan.top_p, plan.min_p)
    shape = plan.forced.shape[::-1]

    def unfinished(carry: tuple) -> Array:
      step, live = carry[0], carry[1]
      return (step < shape[0]) & jnp.any(live)

    def advance(carry: tuple) -> tuple:
      step, live, device, chunk = carry
      drawn = sampling.draw(
        device.logits,
        plan.key_data,
        plan.token_index + step,
        filters,
        jax.lax.dynamic_index_in_dim(plan.forced, step, axis=1, keepdims=False),
        vocab_limit=self._vocab_limit,
      )
      token_ids = jnp.where(live, drawn.token_ids, 0)
      out = models.decode_step(params, self._model, device.cache, token_ids, live)
      stopped = live & jnp.any(token_ids[:, None] == plan.stop_ids, axis=1)
      routed = self._compact(out.experts)
      chunk = Chunk(
        token_ids=chunk.token_ids.at[step].set(token_ids),
        log_probs=chunk.log_probs.at[step].set(drawn.log_probs),
        entropies=chunk.entropies.at[step].set(drawn.entropies),
        sampling_log_probs=chunk.sampling_log_probs.at[step].set(drawn.sampling_log_probs),
        counts=chunk.counts + live,
        stopped=chunk.stopped | stopped,
        experts=None if routed is None else chunk.experts.at[step].set(routed),
      )
      logits = jnp.where(live[:, None], out.logits, device.logits)
      device = DeviceState(cache=out.cache, logits=logits)
      return step + 1, live & ~stopped & (step + 1 < plan.budget), device, chunk

    record = self._config.record_experts
    routed = jax.eval_shape(self._routed, device, params) if record else None
    chunk = Chunk(
      token_ids=jnp.zeros(shape, jnp.int32),
      log_probs=jnp.zeros(shape, jnp.float32),
      entropies=jnp.zeros(shape, jnp.float32),
      sampling_log_probs=jnp.zeros(shape, jnp.float32),
      counts=jnp.zeros(shape[1:], jnp.int32),
      stopped=jnp.zeros(shape[1:], bool),
      experts=None if routed is None else jnp.zeros((shape[0], *routed.shape), routed.dtype),
    )
    start = (jnp.int32(0), plan.budget > 0, device, chunk)
    _, _, device, chunk = jax.lax.while_loop(unfinished, advance, start)
    return device, jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1) if v.ndim > 1 else v, chunk)

  def _routed(self, device: DeviceState, params: Any) -> Array | None:
    """What the routers choose in one step."""
    nothing = jnp.zeros(self.slots, jnp.int32)
    out = models.decode_step(params, self._model, device.cache, nothing, nothing > 0)
    return self._compact(out.experts)


def programs_of_lane(
  model_config: ModelConfig, config: EngineConfig, vocab_limit: int | None
) -> Programs:
  """Programs for one lane of ``config``: one set for all lanes and engines of the same shapes."""
  lane = EngineConfig(
    slots=config.slots // config.lanes,
    max_length=config.max_length,
    chunk_tokens=config.chunk_tokens,
    extend_buckets=config.extend_buckets,
    extend_rows=config.extend_rows,
    block_tokens=config.block_tokens,
    max_stop_ids=config.max_stop_ids,
    record_experts=config.record_experts,
  )
  return _programs(model_config, lane.freeze(), vocab_limit)


@functools.lru_cache(maxsize=16)
def _programs(model_config: ModelConfig, config: EngineConfig, vocab_limit: int | None) -> Programs:
  return Programs(model_config, config, vocab_limit)
