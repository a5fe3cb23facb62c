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
from agentjax.engine.grammar import Masks
from agentjax.engine.request import Chunk, DecodePlan
from agentjax.engine.speculation import lookup, written
from agentjax.models import Cache, ModelConfig
from agentjax.models.blocks import Appended
from agentjax.trajectory.experts import compact_dtype

Array = jax.Array


@flax.struct.dataclass
class DeviceState:
  """All slots of one lane. Every dispatch consumes one and gives the next."""

  cache: Cache
  logits: Array  # float32 [slots, vocab], of the token each slot takes next
  history: Array | None = None  # int32 [slots, max_length], ids held, where drafts are made of them
  ahead: models.Ahead | None = None  # of prediction heads, where these make the drafts


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
    attention_only: whether it has nothing else, so that a part of a context can be had from it.
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
    in_blocks = [v.dtype for v, t in zip(shapes, timed, strict=True) if t]
    self._dtypes = tuple(dict.fromkeys(in_blocks))
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
      history=jnp.zeros((self.slots, length), jnp.int32)
      if self._config.speculate == "ngram"
      else None,
      ahead=models.init_ahead(self._model, self.slots, length, self._config.draft_tokens)
      if self._config.speculate == "mtp"
      else None,
    )

  def _find_time_axes(self) -> tuple[list[jax.ShapeDtypeStruct], list[int | None]]:
    """Of every array of the device state its shape and its axis of time: the one that grows."""
    length = self._config.max_length
    # An exact computation rounds the length up.
    more = max(1, self._model.exact_chunk * self._model.attention_block)
    shapes, longer = (
      jax.tree.leaves(jax.eval_shape(functools.partial(self._empty, n)))
      for n in (length, length + more)
    )
    axes: list[int | None] = []
    for a, b in zip(shapes, longer, strict=True):
      grown = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
      axes.append(grown[0] if grown else None)
    return shapes, axes

  def _prepare(self, params: Any) -> Any:
    # Arrays that pass through unchanged would be shared with the trainer, which donates them.
    heads = self._config.speculate == "mtp"
    return jax.tree.map(jnp.copy, models.prepare_decode_params(params, self._model, heads=heads))

  def _extend(
    self, device: DeviceState, params: Any, rows: Array, token_ids: Array, counts: Array
  ) -> tuple[DeviceState, Array | None]:
    """``counts[r]`` tokens into slot ``rows[r]``; a row that is not used names no slot.

    Beside the state, what the routers chose, [rows, tokens, routers, choices], where recorded.
    """
    out = models.extend(params, self._model, device.cache, rows, token_ids, counts)
    logits = device.logits.at[rows].set(out.logits, mode="drop")
    history, ahead = device.history, device.ahead
    starts = device.cache.lengths.at[rows].get(mode="clip")
    if history is not None:
      history = written(history, rows, starts, token_ids, counts)
    if ahead is not None:
      ahead = self._follow(params, ahead, (rows, starts, counts), out.hidden, token_ids)
    device = DeviceState(cache=out.cache, logits=logits, history=history, ahead=ahead)
    return device, self._compact(out.experts)

  def _follow(
    self,
    params: Any,
    ahead: models.Ahead,
    where: tuple[Array, Array, Array],
    hidden: Any,
    token_ids: Array,
    **settings: Any,
  ) -> models.Ahead:
    """``counts[r]`` tokens into the heads' part of slot ``rows[r]``, from ``starts[r]`` on."""
    rows, starts, counts = where
    positions = starts[:, None] + jnp.arange(token_ids.shape[1])
    return models.follow(
      params,
      self._model,
      ahead,
      Appended(rows, positions, counts),
      hidden,
      token_ids,
      max_length=self._config.max_length,
      **settings,
    )

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
    stacked = {dtype: jnp.stack(v) for dtype, *v in zip(self._dtypes, *blocks, strict=True)}

    def one(i: Array, values: list[Array]) -> list[Array]:
      row, block = rows[i // block_count], i % block_count
      start = (first + block) * self.block_tokens
      taken, written = dict.fromkeys(self._dtypes, 0), []
      for value, (_, axis) in zip(values, timed, strict=True):
        shape = self._block_shape(value.shape, axis)
        end = taken[value.dtype] + math.prod(shape)
        part = stacked[value.dtype][block, taken[value.dtype] : end].reshape(shape)
        taken[value.dtype] = end
        place = [row, *(start if d == axis else 0 for d in range(1, value.ndim))]
        written.append(jax.lax.dynamic_update_slice(value, part, place))
      return written

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
    """Blocks ``first`` and on of a slot; the last block of a slot ends where the slot ends.

    A block is one flat array of each dtype: to hand over many small ones costs the host more.
    """

    def block(index: int) -> tuple[Array, ...]:
      start = (first + index) * self.block_tokens
      parts: dict[jnp.dtype, list[Array]] = {dtype: [] for dtype in self._dtypes}
      for leaf, axis in zip(jax.tree.leaves(device), self._time_axes, strict=True):
        if axis is not None:
          place = [slot, *(start if d == axis else 0 for d in range(1, leaf.ndim))]
          part = jax.lax.dynamic_slice(leaf, place, self._block_shape(leaf.shape, axis))
          parts[leaf.dtype].append(part.reshape(-1))
      return tuple(jnp.concatenate(part) for part in parts.values())

    return tuple(block(i) for i in range(self.transfer_blocks))

  def _block_shape(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Of the part of an array of all slots that belongs to a block of one."""
    return (1, *(self.block_tokens if d == axis else n for d, n in enumerate(shape) if d))

  def _decode(
    self, device: DeviceState, params: Any, plan: DecodePlan
  ) -> tuple[DeviceState, Chunk]:
    """Draws, feeds and records a token for every live slot until none is live."""
    if self._config.speculate != "none":
      return self._decode_drafts(device, params, plan)
    filters = sampling.Filters(plan.temperature, plan.top_k, plan.top_p, plan.min_p)
    shape = plan.forced.shape[::-1]
    masks: Masks | None = plan.grammars if self._config.grammar_states else None

    def unfinished(carry: tuple) -> Array:
      step, live = carry[0], carry[1]
      return (step < shape[0]) & jnp.any(live)

    def advance(carry: tuple) -> tuple:
      step, live, device, state, chunk = carry
      drawn = sampling.draw(
        device.logits,
        plan.key_data,
        plan.token_index + step,
        filters,
        jax.lax.dynamic_index_in_dim(plan.forced, step, axis=1, keepdims=False),
        vocab_limit=self._vocab_limit,
        masks=masks,
        grammar_state=state,
        row_by_row=self._model.exact_chunk > 0,
      )
      token_ids = jnp.where(live, drawn.token_ids, 0)
      out = self._step(params, device.cache, token_ids, live)
      stopped = live & jnp.any(token_ids[:, None] == plan.stop_ids, axis=1)
      routed = self._compact(out.experts)
      chunk = Chunk(
        token_ids=chunk.token_ids.at[step].set(token_ids),
        behaviour_log_probs=chunk.behaviour_log_probs.at[step].set(drawn.behaviour_log_probs),
        entropies=chunk.entropies.at[step].set(drawn.entropies),
        sampling_log_probs=chunk.sampling_log_probs.at[step].set(drawn.sampling_log_probs),
        counts=chunk.counts + live,
        stopped=chunk.stopped | stopped,
        experts=None if routed is None else chunk.experts.at[step].set(routed),
      )
      logits = jnp.where(live[:, None], out.logits, device.logits)
      device = device.replace(cache=out.cache, logits=logits)
      live &= ~stopped & (step + 1 < plan.budget)
      if masks is not None:
        # Only who goes on: nothing is allowed behind a stop id.
        state = jnp.where(live, masks.advance(state, token_ids), state)
      return step + 1, live, device, state, chunk

    record = self._config.record_experts
    routed = jax.eval_shape(self._routed, device, params) if record else None
    chunk = Chunk(
      token_ids=jnp.zeros(shape, jnp.int32),
      behaviour_log_probs=jnp.zeros(shape, jnp.float32),
      entropies=jnp.zeros(shape, jnp.float32),
      sampling_log_probs=jnp.zeros(shape, jnp.float32),
      counts=jnp.zeros(shape[1:], jnp.int32),
      stopped=jnp.zeros(shape[1:], bool),
      experts=None if routed is None else jnp.zeros((shape[0], *routed.shape), routed.dtype),
    )
    state = None if masks is None else masks.state
    start = (jnp.int32(0), plan.budget > 0, device, state, chunk)
    _, _, device, _, chunk = jax.lax.while_loop(unfinished, advance, start)
    return device, jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1) if v.ndim > 1 else v, chunk)

  def _decode_drafts(
    self, device: DeviceState, params: Any, plan: DecodePlan
  ) -> tuple[DeviceState, Chunk]:
    """``_decode``, with several tokens a step where drafts prove right.

    A token is a function of the logits before it, the call's key and its index. So a draft is right
    exactly if the draw at its place gives it: nothing is accepted by chance, and tokens and
    log-probs are those of ``_decode``, up to how the model's step rounds in another shape.
    """
    filters = sampling.Filters(plan.temperature, plan.top_k, plan.top_p, plan.min_p)
    slots, size = plan.forced.shape
    drafted = self._config.draft_tokens
    window = drafted + 1
    masks: Masks | None = plan.grammars if self._config.grammar_states else None
    place = jnp.arange(window)

    def forced_at(index: Array) -> Array:
      known = jnp.take_along_axis(plan.forced, jnp.minimum(index, size - 1), axis=1)
      return jnp.where(index < size, known, -1)

    def draw(logits: Array, index: Array, state: Array | None) -> sampling.Draws:
      """One draw for each of [slots, places], whose rows lie one after the other."""
      count = index.shape[1]

      def rows(value: Any) -> Any:
        return jax.tree.map(lambda v: jnp.repeat(v, count, axis=0), value)

      drawn = sampling.draw(
        logits.reshape(slots * count, -1),
        rows(plan.key_data),
        (plan.token_index[:, None] + index).reshape(-1),
        rows(filters),
        forced_at(index).reshape(-1),
        vocab_limit=self._vocab_limit,
        masks=masks and masks._replace(grammar=rows(masks.grammar)),
        grammar_state=None if state is None else state.reshape(-1),
      )
      return sampling.Draws(*(v.reshape(slots, count) for v in drawn))

    def foresee(
      device: DeviceState, live: Array, token_ids: Array, filled: Array, state: Array | None
    ) -> tuple[Array, models.Ahead]:
      """Drafts behind ``token_ids``: draws from what the heads say, by the noise of their place."""
      previous = token_ids

      def choose(step: int, logits: Array) -> Array:
        nonlocal state, previous
        if masks is not None and state is not None:
          state = masks.advance(state, previous)
        index = filled[:, None] + step + 1
        chosen = draw(logits, index, None if state is None else state[:, None]).token_ids[:, 0]
        previous = jnp.where(live, chosen, 0)
        return previous

      assert device.ahead is not None
      return models.draft(
        params,
        self._model,
        device.ahead,
        device.cache.lengths,
        token_ids,
        live,
        tokens=drafted,
        max_length=self._config.max_length,
        choose=choose,
      )

    def advance(carry: tuple) -> tuple:
      live, device, state, chunk = carry
      filled, lengths = chunk.counts, device.cache.lengths
      first = draw(device.logits, filled[:, None], None if state is None else state[:, None])
      start = jnp.where(live[:, None], first.token_ids, 0)
      history, ahead = device.history, device.ahead
      if ahead is None:
        history = written(history, jnp.arange(slots), lengths, start, live.astype(jnp.int32))
        drafts, found = lookup(history, lengths + 1, drafted)
      else:
        drafts, ahead = foresee(device, live, start[:, 0], filled, state)
        found = live
      forced = forced_at(filled[:, None] + place[1:])
      drafts = jnp.where(forced >= 0, forced, drafts)
      token_ids = jnp.concatenate([start, drafts], axis=1)
      states = None
      if masks is not None:
        path = [state]
        for j in range(window):
          path.append(masks.advance(path[-1], token_ids[:, j]))
        states = jnp.stack(path, axis=1)  # before each token of the window, and behind the last
      out = models.verify(params, self._model, device.cache, token_ids, live)
      behind = draw(
        out.logits[:, :-1],
        filled[:, None] + place[1:],
        None if states is None else states[:, 1:-1],
      )
      stops = jnp.any(token_ids[:, :, None] == plan.stop_ids[:, None], axis=-1)
      right = (behind.token_ids == drafts) & ~stops[:, :-1]
      right &= filled[:, None] + place[1:] < plan.budget[:, None]
      taken = jnp.cumprod(jnp.concatenate([live[:, None], right], axis=1), axis=1).astype(bool)
      counts = jnp.sum(taken, axis=1, dtype=jnp.int32)
      cache = models.accept(params, self._model, lengths, out.pending, counts)
      last = jnp.maximum(counts - 1, 0)[:, None, None]
      logits = jnp.take_along_axis(out.logits, last, axis=1)[:, 0]
      logits = jnp.where(live[:, None], logits, device.logits)
      if ahead is None:
        history = written(history, jnp.arange(slots), lengths, token_ids, counts)
      else:
        where = jnp.where(live, jnp.arange(slots), slots), lengths, counts
        ahead = self._follow(params, ahead, where, out.hidden, token_ids, every_slot=True)

      target = jnp.where(taken, filled[:, None] + place, size)

      def record(into: Array, values: Array) -> Array:
        return into.at[jnp.arange(slots)[:, None], target].set(values, mode="drop")

      both = [jnp.concatenate(v, axis=1) for v in zip(first[1:], behind[1:], strict=True)]
      behaviour_log_probs, entropies, sampling_log_probs = both
      stopped = jnp.any(taken & stops, axis=1)
      routed = self._compact(out.experts)
      guesses = found[:, None] & live[:, None] & (forced < 0)
      chunk = Chunk(
        token_ids=record(chunk.token_ids, token_ids),
        behaviour_log_probs=record(chunk.behaviour_log_probs, behaviour_log_probs),
        entropies=record(chunk.entropies, entropies),
        sampling_log_probs=record(chunk.sampling_log_probs, sampling_log_probs),
        counts=filled + counts,
        stopped=chunk.stopped | stopped,
        experts=None if routed is None else record(chunk.experts, routed),
        drafted=chunk.drafted + jnp.sum(guesses, axis=1, dtype=jnp.int32),
        accepted=chunk.accepted + jnp.sum(guesses & taken[:, 1:], axis=1, dtype=jnp.int32),
      )
      goes_on = live & ~stopped & (filled + counts < plan.budget)
      if states is not None:
        after = jnp.take_along_axis(states, counts[:, None], axis=1)[:, 0]
        state = jnp.where(goes_on, after, state)
      device = DeviceState(cache=cache, logits=logits, history=history, ahead=ahead)
      return goes_on, device, state, chunk

    def blank(dtype: Any, *shape: int) -> Array:
      return jnp.zeros((slots, *shape), dtype)

    routed = None
    if self._config.record_experts:
      shape = jax.eval_shape(self._routed, device, params)
      routed = blank(shape.dtype, size, *shape.shape[1:])
    chunk = Chunk(
      token_ids=blank(jnp.int32, size),
      behaviour_log_probs=blank(jnp.float32, size),
      entropies=blank(jnp.float32, size),
      sampling_log_probs=blank(jnp.float32, size),
      counts=blank(jnp.int32),
      stopped=blank(bool),
      experts=routed,
      drafted=blank(jnp.int32),
      accepted=blank(jnp.int32),
    )
    start = (plan.budget > 0, device, None if masks is None else masks.state, chunk)
    _, device, _, chunk = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), advance, start)
    return device, chunk

  def _step(self, params: Any, cache: Cache, token_ids: Array, live: Array) -> models.Decoded:
    """One token into every live slot."""
    return models.decode_step(params, self._model, cache, token_ids, live)

  def _routed(self, device: DeviceState, params: Any) -> Array | None:
    """What the routers choose in one step."""
    nothing = jnp.zeros(self.slots, jnp.int32)
    out = self._step(params, device.cache, nothing, nothing > 0)
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
    grammar_states=config.grammar_states,
    grammar_classes=config.grammar_classes,
    grammars=config.grammars,
    speculate=config.speculate,
    draft_tokens=config.draft_tokens,
  )
  return _programs(model_config, lane.freeze(), vocab_limit)


@functools.lru_cache(maxsize=16)
def _programs(model_config: ModelConfig, config: EngineConfig, vocab_limit: int | None) -> Programs:
  return Programs(model_config, config, vocab_limit)
