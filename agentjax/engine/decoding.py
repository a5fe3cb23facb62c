"""The inside of the decode program: it draws, feeds and records tokens for every slot at once."""

from __future__ import annotations

import dataclasses
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
  """All slots of one lane. Every dispatch consumes one state and returns the next."""

  cache: Cache
  logits: Array  # float32 [slots, vocab], of each slot's next token
  stopped: Array  # bool [slots], the last dispatch ended in a stop id there
  grammar_state: Array | None = None  # int32 [slots], state in its grammar, if there are any
  history: Array | None = None  # int32 [slots, max_length], ids held, if drafts are made of them
  mtp_cache: models.MtpCache | None = None  # of prediction heads, if these make the drafts


def compact_experts(model: ModelConfig, experts: Array | None, *, record: bool) -> Array | None:
  """[routers, ..., choices] as compact [..., routers, choices]; None if not recorded."""
  if experts is None or not record:
    return None
  ids = model.num_experts + model.zero_experts
  return jnp.moveaxis(experts, 0, -2).astype(compact_dtype(ids))


def feed_heads(
  params: Any,
  model: ModelConfig,
  mtp_cache: models.MtpCache,
  where: tuple[Array, Array, Array],
  hidden: Any,
  token_ids: Array,
  **settings: Any,
) -> models.MtpCache:
  """Feeds ``counts[r]`` tokens to the prediction heads of slot ``rows[r]``, from ``starts[r]`` on.

  ``where`` is rows, starts and counts; ``settings`` are those of ``models.follow``.
  """
  rows, starts, counts = where
  positions = starts[:, None] + jnp.arange(token_ids.shape[1])
  appended = Appended(rows, positions, counts)
  return models.follow(params, model, mtp_cache, appended, hidden, token_ids, **settings)


@dataclasses.dataclass(frozen=True)
class Decoding:
  """One decode dispatch, with all that stays constant in it.

  Shapes: S slots, N tokens of a dispatch, W tokens of a window (a draft and the token before it).

  Attributes:
    model, config: of the lane.
    vocab_limit: ids from here on are never drawn.
    params: for decoding.
    plan: what each slot does.
  """

  model: ModelConfig
  config: EngineConfig
  vocab_limit: int | None
  params: Any
  plan: DecodePlan

  def run(self, device: DeviceState) -> tuple[DeviceState, Chunk]:
    """Draws, feeds and records tokens of live slots until none is live or the chunk is full."""
    size = self.plan.forced.shape[1]

    def unfinished(carry: tuple) -> Array:
      step, live = carry[0], carry[1]
      return (step < size) & jnp.any(live)

    start = (
      jnp.int32(0),
      self.plan.budget > 0,
      device,
      self._grammar_rows(device),
      self._empty(device, *self.plan.forced.shape[::-1]),
    )
    _, _, device, state, chunk = jax.lax.while_loop(unfinished, self._advance, start)
    device = self._left(device, state, chunk)
    return device, jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1) if v.ndim > 1 else v, chunk)

  def run_with_drafts(self, device: DeviceState) -> tuple[DeviceState, Chunk]:
    """As ``run``, but a step takes several tokens where drafts are right.

    A token is a function of the logits before it, the call's key and its index. So a draft is right
    exactly if the draw at its place gives the same token. Nothing is accepted by chance: tokens and
    log-probs are those of ``run``, up to the rounding of a model step of another shape.
    """
    empty = self._empty(device, *self.plan.forced.shape)
    start = (self.plan.budget > 0, device, self._grammar_rows(device), empty)
    _, device, state, chunk = jax.lax.while_loop(
      lambda carry: jnp.any(carry[0]), self._advance_window, start
    )
    return self._left(device, state, chunk), chunk

  def _grammar_rows(self, device: DeviceState) -> Array | None:
    """The row of ``Masks`` that each slot begins with; the host does not know it ahead."""
    masks = self._masks
    if masks is None:
      return None
    return jnp.where(self.plan.ahead, masks.first + device.grammar_state, masks.state)

  def _left(self, device: DeviceState, state: Array | None, chunk: Chunk) -> DeviceState:
    """The device with what a dispatch ahead needs to know of this one."""
    device = dataclasses.replace(device, stopped=chunk.stopped)
    if self._masks is None or state is None:
      return device
    return dataclasses.replace(device, grammar_state=state - self._masks.first)

  @property
  def _masks(self) -> Masks | None:
    return self.plan.grammars if self.config.grammar_states else None

  def _compact(self, experts: Array | None) -> Array | None:
    return compact_experts(self.model, experts, record=self.config.record_experts)

  def _step(self, cache: Cache, token_ids: Array, live: Array) -> models.Decoded:
    """One token into every live slot."""
    return models.decode_step(self.params, self.model, cache, token_ids, live)

  def _routed(self, device: DeviceState) -> Any:
    """Shape and dtype of what the routers choose in one step; None if not recorded."""
    if not self.config.record_experts:
      return None
    nothing = jnp.zeros(self.plan.budget.shape, jnp.int32)
    return jax.eval_shape(
      lambda cache: self._compact(self._step(cache, nothing, nothing > 0).experts), device.cache
    )

  def _empty(self, device: DeviceState, *lead: int) -> Chunk:
    """An empty chunk whose arrays begin with the axes ``lead``: S and N in either order."""
    slots = self.plan.budget.shape
    routed = self._routed(device)
    drafting = self.config.speculate != "none"
    return Chunk(
      token_ids=jnp.zeros(lead, jnp.int32),
      behaviour_log_probs=jnp.zeros(lead, jnp.float32),
      entropies=jnp.zeros(lead, jnp.float32),
      sampling_log_probs=jnp.zeros(lead, jnp.float32),
      counts=jnp.zeros(slots, jnp.int32),
      stopped=jnp.zeros(slots, bool),
      experts=None if routed is None else jnp.zeros((*lead, *routed.shape[1:]), routed.dtype),
      drafted=jnp.zeros(slots, jnp.int32) if drafting else None,
      accepted=jnp.zeros(slots, jnp.int32) if drafting else None,
    )

  # One token a step.

  def _advance(self, carry: tuple) -> tuple:
    step, live, device, state, chunk = carry
    plan, masks = self.plan, self._masks
    drawn = sampling.draw(
      device.logits,
      plan.key_data,
      plan.token_index + step,
      plan.filters,
      jax.lax.dynamic_index_in_dim(plan.forced, step, axis=1, keepdims=False),
      vocab_limit=self.vocab_limit,
      masks=masks,
      grammar_state=state,
      row_by_row=self.model.exact_chunk > 0,
    )
    token_ids = jnp.where(live, drawn.token_ids, 0)
    out = self._step(device.cache, token_ids, live)
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
    live &= ~stopped
    if masks is not None:
      # Only slots that go on: a grammar allows nothing after a stop id.
      state = jnp.where(live, masks.advance(state, token_ids), state)
    live &= step + 1 < plan.budget
    return step + 1, live, device, state, chunk

  # A window of tokens a step.

  def _advance_window(self, carry: tuple) -> tuple:
    live, device, state, chunk = carry
    filled, lengths = chunk.counts, device.cache.lengths
    first = self._draw(device.logits, filled[:, None], None if state is None else state[:, None])
    start = jnp.where(live[:, None], first.token_ids, 0)
    drafts, found, device = self._drafts(device, live, start, filled, state)
    index = filled[:, None] + jnp.arange(1, drafts.shape[1] + 1)  # of the drafts [S, W - 1]
    forced = self._forced(index)
    drafts = jnp.where(forced >= 0, forced, drafts)
    token_ids = jnp.concatenate([start, drafts], axis=1)
    states = self._grammar_path(state, token_ids)

    out = models.verify(self.params, self.model, device.cache, token_ids, live)
    between = None if states is None else states[:, 1:-1]
    behind = self._draw(out.logits[:, :-1], index, between)
    stops = jnp.any(token_ids[:, :, None] == self.plan.stop_ids[:, None], axis=-1)
    right = (behind.token_ids == drafts) & ~stops[:, :-1] & (index < self.plan.budget[:, None])
    taken = jnp.cumprod(jnp.concatenate([live[:, None], right], axis=1), axis=1).astype(bool)
    counts = jnp.sum(taken, axis=1, dtype=jnp.int32)

    device = self._accept(device, out, live, token_ids, lengths, counts)
    guesses = found[:, None] & live[:, None] & (forced < 0)
    both = [jnp.concatenate(v, axis=1) for v in zip(first[1:], behind[1:], strict=True)]
    stopped = jnp.any(taken & stops, axis=1)
    chunk = self._record(chunk, taken, (token_ids, *both, self._compact(out.experts)))._replace(
      counts=filled + counts,
      stopped=chunk.stopped | stopped,
      drafted=chunk.drafted + jnp.sum(guesses, axis=1, dtype=jnp.int32),
      accepted=chunk.accepted + jnp.sum(guesses & taken[:, 1:], axis=1, dtype=jnp.int32),
    )
    live &= ~stopped
    if states is not None:
      after = jnp.take_along_axis(states, counts[:, None], axis=1)[:, 0]
      state = jnp.where(live, after, state)
    return live & (filled + counts < self.plan.budget), device, state, chunk

  def _forced(self, index: Array) -> Array:
    """The forced token at each index of a call; -1 where the token is drawn."""
    size = self.plan.forced.shape[1]
    known = jnp.take_along_axis(self.plan.forced, jnp.minimum(index, size - 1), axis=1)
    return jnp.where(index < size, known, -1)

  def _draw(self, logits: Array, index: Array, state: Array | None) -> sampling.Draws:
    """One draw for each slot and place; a slot's places are neighbours in the flat batch."""
    slots, count = index.shape

    def rows(value: Any) -> Any:
      return jax.tree.map(lambda v: jnp.repeat(v, count, axis=0), value)

    drawn = sampling.draw(
      logits.reshape(slots * count, -1),
      rows(self.plan.key_data),
      (self.plan.token_index[:, None] + index).reshape(-1),
      rows(self.plan.filters),
      self._forced(index).reshape(-1),
      vocab_limit=self.vocab_limit,
      masks=self._masks and self._masks._replace(grammar=rows(self._masks.grammar)),
      grammar_state=None if state is None else state.reshape(-1),
    )
    return sampling.Draws(*(v.reshape(slots, count) for v in drawn))

  def _drafts(
    self, device: DeviceState, live: Array, start: Array, filled: Array, state: Array | None
  ) -> tuple[Array, Array, DeviceState]:
    """Drafts [S, W - 1] after ``start`` [S, 1], whether each slot has one, and the new state."""
    if device.mtp_cache is not None:
      drafts, mtp_cache = self._drafts_of_heads(device, live, start[:, 0], filled, state)
      return drafts, live, dataclasses.replace(device, mtp_cache=mtp_cache)
    assert device.history is not None
    lengths, slots = device.cache.lengths, jnp.arange(live.size)
    history = written(device.history, slots, lengths, start, live.astype(jnp.int32))
    drafts, found = lookup(history, lengths + 1, self.config.draft_tokens)
    return drafts, found, dataclasses.replace(device, history=history)

  def _drafts_of_heads(
    self, device: DeviceState, live: Array, token_ids: Array, filled: Array, state: Array | None
  ) -> tuple[Array, models.MtpCache]:
    """Drafts after ``token_ids``: draws from the heads' logits, with the noise of their places."""
    previous = token_ids

    def choose(step: int, logits: Array) -> Array:
      nonlocal state, previous
      if self._masks is not None and state is not None:
        state = self._masks.advance(state, previous)
      index = filled[:, None] + step + 1
      drawn = self._draw(logits, index, None if state is None else state[:, None])
      previous = jnp.where(live, drawn.token_ids[:, 0], 0)
      return previous

    assert device.mtp_cache is not None
    return models.draft(
      self.params,
      self.model,
      device.mtp_cache,
      device.cache.lengths,
      token_ids,
      live,
      tokens=self.config.draft_tokens,
      max_length=self.config.max_length,
      choose=choose,
    )

  def _grammar_path(self, state: Array | None, token_ids: Array) -> Array | None:
    """[S, W + 1] grammar states before each token of a window, and after the last."""
    if self._masks is None or state is None:
      return None
    path = [state]
    for j in range(token_ids.shape[1]):
      path.append(self._masks.advance(path[-1], token_ids[:, j]))
    return jnp.stack(path, axis=1)

  def _accept(
    self,
    device: DeviceState,
    out: models.Verified,
    live: Array,
    token_ids: Array,
    lengths: Array,
    counts: Array,
  ) -> DeviceState:
    """The state after the first ``counts`` tokens of every window."""
    cache = models.accept(self.params, self.model, lengths, out.pending, counts)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    logits = jnp.take_along_axis(out.logits, last, axis=1)[:, 0]
    logits = jnp.where(live[:, None], logits, device.logits)
    history, mtp_cache, slots = device.history, device.mtp_cache, jnp.arange(live.size)
    if mtp_cache is None:
      assert history is not None
      history = written(history, slots, lengths, token_ids, counts)
    else:
      where = jnp.where(live, slots, live.size), lengths, counts
      mtp_cache = feed_heads(
        self.params,
        self.model,
        mtp_cache,
        where,
        out.hidden,
        token_ids,
        max_length=self.config.max_length,
        every_slot=True,
      )
    return dataclasses.replace(
      device, cache=cache, logits=logits, history=history, mtp_cache=mtp_cache
    )

  def _record(self, chunk: Chunk, taken: Array, values: tuple[Array | None, ...]) -> Chunk:
    """The chunk with the taken values [S, W, ...] of a window added.

    Values are ids, behaviour log-probs, entropies, sampling log-probs and experts, or None.
    """
    slots, size = self.plan.forced.shape
    index = chunk.counts[:, None] + jnp.arange(taken.shape[1])
    rows, target = jnp.arange(slots)[:, None], jnp.where(taken, index, size)
    names = ("token_ids", "behaviour_log_probs", "entropies", "sampling_log_probs", "experts")
    return chunk._replace(
      **{
        name: getattr(chunk, name).at[rows, target].set(value, mode="drop")
        for name, value in zip(names, values, strict=True)
        if value is not None
      }
    )
