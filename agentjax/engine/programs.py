"""The engine's compiled functions: few, of fixed shape, with the cache updated in place."""

from __future__ import annotations

import collections
import functools
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


@flax.struct.dataclass
class Snapshot:
  """One context off the slots, on the device: what it takes to go on anywhere."""

  state: Cache  # one slot
  logits: Array  # float32 [1, vocab]
  length: int = flax.struct.field(pytree_node=False)  # tokens
  version: int = flax.struct.field(pytree_node=False)  # of the weights when it was read


class Programs:
  """One jitted function a job. Shapes depend on the configs alone, never on the requests.

  ``config`` is that of one lane. ``programs_of_lane`` shares programs between engines.

  Attributes:
    prepare: training parameters to per-layer decode parameters, a copy in any case.
    extend: one function a bucket.
    decode: up to ``chunk_tokens`` tokens for all slots.
    place: puts a context into several slots.
    read: takes a context out of a slot.
    traces: how often each was compiled; more than once means a shape leaked in, or other devices.
  """

  def __init__(
    self, model_config: ModelConfig, config: EngineConfig, vocab_limit: int | None
  ) -> None:
    self.slots = config.slots
    self.place_width = min(self.slots, 16)
    self.traces: collections.Counter[str] = collections.Counter()
    self._model, self._config, self._vocab_limit = model_config, config, vocab_limit
    self.initial = self._jit("initial", self._initial)
    self.prepare = self._jit("prepare", self._prepare)
    self.decode = self._jit("decode", self._decode, donate=True)
    self.place = self._jit("place", self._place, donate=True)
    self.read = self._jit("read", self._read)
    self.extend = {
      tokens: self._jit(f"extend_{rows}x{tokens}", self._extend, donate=True)
      for tokens, rows in zip(config.extend_buckets, config.extend_rows, strict=True)
    }

  def _jit(self, name: str, function: Callable[..., Any], *, donate: bool = False) -> Any:
    def counted(*args: Any) -> Any:
      self.traces[name] += 1
      return function(*args)

    counted.__name__ = name
    return jax.jit(counted, donate_argnums=(0,) if donate else ())

  def _initial(self) -> DeviceState:
    return DeviceState(
      cache=models.init_cache(self._model, self.slots, self._config.max_length),
      logits=jnp.zeros((self.slots, self._model.vocab_size), jnp.float32),
    )

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

  def _place(self, device: DeviceState, state: Cache, logits: Array, rows: Array) -> DeviceState:
    """One context into every slot of ``rows``; places that are not used name no slot."""
    spread = jax.tree.map(
      lambda v: jnp.broadcast_to(v, (self.place_width, *v.shape[1:])), (state, logits)
    )
    return DeviceState(
      cache=models.write_slots(device.cache, rows, spread[0]),
      logits=device.logits.at[rows].set(spread[1], mode="drop"),
    )

  def _read(self, device: DeviceState, rows: Array) -> tuple[Cache, Array]:
    return models.read_slots(device.cache, rows), device.logits[rows]

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
        row_by_row=self._model.exact_chunk > 0,
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
    max_stop_ids=config.max_stop_ids,
    record_experts=config.record_experts,
  )
  return _programs(model_config, lane.freeze(), vocab_limit)


@functools.lru_cache(maxsize=16)
def _programs(model_config: ModelConfig, config: EngineConfig, vocab_limit: int | None) -> Programs:
  return Programs(model_config, config, vocab_limit)
