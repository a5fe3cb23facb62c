"""Deciding the tokens of a block: soft parallel decoding, and decoding by a threshold.

All slots work on a block each, in one compiled loop over forward passes. Keys and values of the
clean blocks before stand in the cache; those of the block itself are written anew in every pass.

Legend: R slots, S tokens of a block, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from agentjax.models import Cache, DecodeParams, ModelConfig, compute_logits, extend
from agentjax.recipes.dmax.config import DecodingConfig

Array = jax.Array


class BlockPlan(NamedTuple):
  """What each slot does with its next block; numpy on the host, jax inside a program."""

  ids: Any  # int32 [R, S], of the tokens that are known
  known: Any  # int32 [R], how many, from the left: the rest of a prompt
  active: Any  # bool [R]
  left: Any  # int32 [R], tokens that may still be drawn
  key_data: Any  # uint32 [R, 2], of the call
  temperature: Any  # float32 [R], 0 is greedy
  stop_ids: Any  # int32 [R, stops], -1 where unused


class BlockFound(NamedTuple):
  """The result; tokens ``known[r] <= i < known[r] + counts[r]`` of slot r are new."""

  ids: Any  # int32 [R, S]
  log_probs: Any  # float32 [R, S], when the token was last predicted
  entropies: Any  # float32 [R, S], likewise
  counts: Any  # int32 [R]
  stopped: Any  # bool [R], the last of them is a stop id
  forwards: Any  # int32 [R], passes that decided tokens
  finite: Any  # bool [R]


class _State(NamedTuple):
  """A block under way; all [R, S] but the last three."""

  ids: Array
  trust: Array  # float32, probability of the token
  entropies: Array
  decided: Array
  forwards: Array  # int32 [R]
  done: Array  # bool [R]
  finite: Array  # bool [R]


class _Predicted(NamedTuple):
  """What a pass predicts at every place, [R, S]."""

  ids: Array
  trust: Array
  entropies: Array
  finite: Array


@dataclasses.dataclass(frozen=True)
class BlockDecoder:
  """The compiled programs of an engine. All are pure; the cache is donated.

  Attributes:
    model: of the parameters.
    decoding: see there.
    block: S.
    mask_id, vocab_limit: see ``NoiseSettings``.
  """

  model: ModelConfig
  decoding: DecodingConfig
  block: int
  mask_id: int
  vocab_limit: int

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
  def prefill(
    self,
    params: DecodeParams,
    cache: Cache,
    token_ids: Int[Array, "slots time"],
    counts: Int[Array, " slots"],
    fresh: Bool[Array, " slots"],
  ) -> Cache:
    """Appends whole blocks of known text; a ``fresh`` slot is emptied first."""
    cache = dataclasses.replace(cache, lengths=jnp.where(fresh, 0, cache.lengths))
    places = cache.lengths[:, None] + jnp.arange(token_ids.shape[1])
    sees = places // self.block * self.block + self.block - 1
    slots = jnp.arange(cache.slots)
    return extend(params, self.model, cache, slots, token_ids, counts, sees=sees).cache

  @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
  def decode(self, params: DecodeParams, cache: Cache, plan: BlockPlan) -> tuple[Cache, BlockFound]:
    """Decides a block in every active slot, and appends it where the text goes on behind it."""
    lengths, slots = cache.lengths, jnp.arange(cache.slots)
    places = jnp.arange(self.block)
    sees = jnp.broadcast_to(lengths[:, None] + self.block - 1, plan.ids.shape)
    draws = self._gumbel(plan, lengths)
    known = places < plan.known[:, None]
    within = ~known & (places < (plan.known + plan.left)[:, None])

    def run(blocks: Any, state: _State, at: Array) -> tuple[Array, Cache]:
      rows = jnp.where(at, slots, cache.slots)
      counts = jnp.where(at, self.block, 0)
      embedded = self._embed(params, state, known)
      held = dataclasses.replace(cache, blocks=blocks, lengths=lengths)
      out = extend(params, self.model, held, rows, state.ids, counts, sees=sees, embedded=embedded)
      assert out.hidden is not None
      return out.hidden, out.cache

    def advance(carry):
      blocks, state = carry
      working = plan.active & ~state.done
      hidden, after = run(blocks, state, working)
      found = self._predict(params, hidden, draws, plan.temperature)
      return after.blocks, self._decide(state, found, plan, within, working)

    start = _State(
      ids=jnp.where(known, plan.ids, self.mask_id),
      trust=jnp.zeros(plan.ids.shape),
      entropies=jnp.zeros(plan.ids.shape),
      decided=jnp.zeros(plan.ids.shape, bool),
      forwards=jnp.zeros(plan.active.shape, jnp.int32),
      done=jnp.zeros(plan.active.shape, bool),
      finite=jnp.ones(plan.active.shape, bool),
    )
    blocks, state = jax.lax.while_loop(
      lambda carry: jnp.any(plan.active & ~carry[1].done), advance, (cache.blocks, start)
    )
    needed = within & ~_behind_stop(state, plan, within)
    counts = jnp.where(plan.active, jnp.sum(needed, axis=1), 0)
    stopped = jnp.any(_is_stop(state.ids, plan) & state.decided & needed, axis=1) & plan.active
    goes_on = plan.active & ~stopped & (plan.left > counts)
    certain = state._replace(trust=jnp.ones_like(state.trust))

    def keep(blocks) -> Cache:
      return run(blocks, certain, goes_on)[1]

    def leave(blocks) -> Cache:
      return dataclasses.replace(cache, blocks=blocks, lengths=lengths)

    cache = jax.lax.cond(jnp.any(goes_on), keep, leave, blocks)
    log_probs = jnp.log(jnp.maximum(state.trust, jnp.finfo(jnp.float32).tiny))
    found = (state.ids, log_probs, state.entropies, counts, stopped, state.forwards, state.finite)
    return cache, BlockFound(*found)

  def _gumbel(self, plan: BlockPlan, starts: Array) -> Array:
    """Float32 [R, S, V], 0 for greedy slots; the noise of a place is the same in every pass."""

    def noise(key_data: Array, start: Array, temperature: Array) -> Array:
      key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
      each = jax.vmap(lambda i: jax.random.fold_in(key, start + i))(jnp.arange(self.block))
      drawn = jax.vmap(lambda k: jax.random.gumbel(k, (self.model.vocab_size,)))(each)
      return jnp.where(temperature > 0, drawn, 0.0)

    return jax.vmap(noise)(plan.key_data, starts, plan.temperature)

  def _embed(self, params: DecodeParams, state: _State, known: Array) -> Array:
    """[R, S, embed]: known tokens, masks, and decided tokens by how sure the policy is.

    A decided token is ``p E[token] + (1 - p) E[mask]``, scaled to the norm
    ``p |E[token]| + (1 - p) |E[mask]|``.
    """
    table = params.embedding.astype(jnp.float32)
    own, mask = table[state.ids], table[self.mask_id]
    if not self.decoding.soft:
      return jnp.where((known | state.decided)[..., None], own, mask)
    trust = jnp.where(known, 1.0, state.trust)[..., None]
    mixed = trust * own + (1 - trust) * mask
    wanted = trust * _norm(own) + (1 - trust) * _norm(mask)
    # A token that is certain is its embedding, to the last bit.
    soft = jnp.where(trust < 1, mixed * wanted / jnp.maximum(_norm(mixed), 1e-12), own)
    return jnp.where((known | state.decided)[..., None], soft, mask)

  def _predict(
    self, params: DecodeParams, hidden: Array, draws: Array, temperature: Array
  ) -> _Predicted:
    """The token at every place, drawn at the slot's temperature, and its probability."""
    logits = compute_logits(params, self.model, hidden)
    ids = jnp.arange(self.model.vocab_size)
    allowed = (ids < self.vocab_limit) & (ids != self.mask_id)
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    log_p = jax.nn.log_softmax(jnp.where(allowed, logits / divisor, -jnp.inf), axis=-1)
    chosen = jnp.argmax(log_p + draws, axis=-1).astype(jnp.int32)
    own = jnp.take_along_axis(log_p, chosen[..., None], axis=-1)[..., 0]
    entropies = -jnp.sum(jnp.where(allowed, jnp.exp(log_p) * jnp.where(allowed, log_p, 0), 0), -1)
    return _Predicted(chosen, jnp.exp(own), entropies, jnp.isfinite(own).all(axis=1))

  def _decide(
    self,
    state: _State,
    found: _Predicted,
    plan: BlockPlan,
    within: Array,
    working: Array,
  ) -> _State:
    """The state after a pass; rows that are not ``working`` stay as they are."""
    settings = self.decoding
    masked = within & ~state.decided & ~_behind_stop(state, plan, within)
    sure = (found.trust >= settings.threshold) & settings.parallel
    if settings.mode == "soft":
      left = jnp.cumsum(masked & ~sure, axis=1) == 0
      first = masked & (jnp.cumsum(masked, axis=1) == 1)
      new = (masked & left) | first
    else:
      surest = jnp.argmax(jnp.where(masked, found.trust, -1.0), axis=1)
      new = masked & (sure | (jnp.arange(masked.shape[1]) == surest[:, None]))
    taken = new | (state.decided if settings.soft else jnp.zeros_like(new))
    changed = jnp.any(new | (taken & (found.ids != state.ids)), axis=1)
    after = state._replace(
      ids=jnp.where(taken, found.ids, state.ids),
      trust=jnp.where(taken, found.trust, state.trust),
      entropies=jnp.where(taken, found.entropies, state.entropies),
      decided=state.decided | new,
      forwards=state.forwards + 1,
      finite=state.finite & found.finite,
    )
    needed = within & ~_behind_stop(after, plan, within)
    done = jnp.all(~needed | after.decided, axis=1)
    if settings.soft:
      most = settings.most_forwards or 2 * self.block
      settled = jnp.all(~needed | (after.trust >= settings.settled), axis=1)
      done &= settled | ~changed | (after.forwards >= most)
    after = after._replace(done=done | ~after.finite)
    return jax.tree.map(
      lambda new, old: jnp.where(working[(...,) + (None,) * (new.ndim - 1)], new, old), after, state
    )


def _norm(x: Array) -> Array:
  return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))


def _is_stop(ids: Array, plan: BlockPlan) -> Array:
  return jnp.any(ids[..., None] == plan.stop_ids[:, None, :], axis=-1)


def _behind_stop(state: _State, plan: BlockPlan, within: Array) -> Array:
  """bool [R, S], places behind the first stop that is decided: nobody will read them."""
  stops = (_is_stop(state.ids, plan) & state.decided & within).astype(jnp.int32)
  return jnp.cumsum(stops, axis=1) - stops > 0
