"""The device side: a fixed number of slots, each one live context, driven from one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agentjax.config import check
from agentjax.engine.config import EngineConfig
from agentjax.engine.grammar import GrammarTable
from agentjax.engine.home import Home, make_homes
from agentjax.engine.programs import programs_of_lane
from agentjax.engine.publish import Publisher, Weights
from agentjax.engine.request import (
  Chunk,
  ContextLengthError,
  DecodePlan,
  EngineError,
)
from agentjax.engine.store import Snapshot, Store, Stored
from agentjax.models import (
  ModelConfig,
  Params,
  num_routers,
  undraftable,
  unverifiable,
)


class Routed(NamedTuple):
  """What the routers chose for some tokens of one slot."""

  slot: int
  start: int  # tokens before these in the context
  dispatched: Any  # of a whole dispatch, still on the device: [rows, tokens, routers, choices]
  row: int
  tokens: int

  def experts(self) -> np.ndarray:
    """[tokens, routers, choices]; waits for the dispatch."""
    return np.asarray(self.dispatched)[self.row, : self.tokens]


class SlotEngine:
  """Slots of one lane. Not thread safe, and nothing here waits but ``decode``.

  The compiled shapes depend on the configs alone: an extension runs in the bucket of its own
  length, a decode dispatch always spans all slots. So what a context gives does not depend on its
  slot, on its neighbours or on the order of the work, bit for bit.

  Args:
    model_config: of the parameters to be published.
    config: ``slots / lanes`` slots are made.
    home: where everything lives; None is that of the first lane on the local devices.
    vocab_limit: ids from here on are never drawn; None allows all of the model's vocabulary.
    store: counts what is read; shared by the lanes of an engine.
    by_policy: several policies have adapters of their own over one base.

  Attributes:
    policies: int [slots], whose adapters each slot runs with.
    lengths: int [slots], tokens each slot holds.
    warm: every program was compiled; one more would be a fault.
    dispatches: programs run so far, by name.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    home: Home | None = None,
    vocab_limit: int | None = None,
    store: Store | None = None,
    by_policy: bool = False,
  ) -> None:
    model_config.validate("model")
    config.validate("engine")
    check(
      not config.record_experts or num_routers(model_config) > 0,
      "engine.record_experts",
      config.record_experts,
      f"False for a model without routers (model.pattern={model_config.pattern!r})",
    )
    reason = unverifiable(model_config)
    check(
      config.speculate == "none" or reason is None,
      "engine.speculate",
      config.speculate,
      f"'none' with {reason}",
    )
    reason = undraftable(model_config)
    check(
      config.speculate != "mtp" or reason is None,
      "engine.speculate",
      config.speculate,
      f"'none' or 'ngram' with {reason}",
    )
    check(
      not model_config.exact_chunk or config.mesh.size == 1,
      "engine.mesh",
      config.mesh.to_dict(),
      f"1 along every axis with model.exact_chunk={model_config.exact_chunk}: sums over devices do "
      "not round as training does",
    )
    # Frozen copies: compiled programs are shared by these values.
    self.model_config = ModelConfig.from_dict(model_config.to_dict()).freeze()
    self.config = EngineConfig.from_dict(config.to_dict()).freeze()
    self.home = home or make_homes(self.config, None)[0]
    self.programs = programs_of_lane(self.model_config, self.config, vocab_limit, self.home.mesh)
    self.slots = self.programs.slots
    self.lengths, self.policies = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.int32)
    self._by_policy = by_policy
    self.dispatches = dict.fromkeys(self.executables(), 0)
    self._grammars: GrammarTable | None = None
    if config.grammar_states:
      vocab = model_config.vocab_size
      self._grammars = GrammarTable(self.config, self.slots, vocab, self.home)
    self._weights: Weights | None = None
    self.warm = False
    with jax.default_device(self.home.devices[0]):
      self._state = self.programs.initial()
      if self.home.mesh is None:
        self._state = self.home.put(self._state)
    self.store = store or make_store(self.config)
    self._blank = Snapshot(self.store.add(self._read_state(0)), (), 0, -1)
    self._filler: tuple[tuple[Any, ...], ...] = ()
    if self.programs.has_blocks:
      filler = self.programs.read_blocks(self._state, np.int32(0), np.int32(0))
      self._filler = filler if self.home.mesh else self.home.put(filler)

  @property
  def weights(self) -> Weights:
    """The weights in use."""
    if self._weights is None:
      raise EngineError("no weights yet: call publish(params, version) first.")
    return self._weights

  def publish(self, params: Params, version: int) -> None:
    """Takes new training parameters (copied), counted by ``version``, for all that is run next.

    They may be sharded; where they span processes, all processes must call this together.
    """
    self.use(Publisher({self.home: self.programs})(params, version)[self.home])

  def use(self, weights: Weights) -> None:
    """Switches to prepared weights."""
    self._weights = weights

  def executables(self) -> tuple[str, ...]:
    """Names of all compiled programs; there are no others, whatever is asked of the engine."""
    moving = ("place", "read", *(("write", "read_blocks") if self.programs.has_blocks else ()))
    return (*moving, "decode", *(p.__name__ for p in self.programs.extend.values()))

  def warmup(self) -> None:
    """Compiles every program, by running each on nothing. Needs weights."""
    params = self.weights.params
    self._place(self._blank, [])
    self._write(self._filler, 0, [])
    self.read(0)
    self._read_blocks(0, 0, 1)
    for tokens, rows in self.programs.extend_rows.items():
      empty = self._rows([], rows, tokens)
      self._state, _ = self.programs.extend[tokens](self._state, params, *empty)
    self.decode(self.idle_plan())
    self.warm = True

  def idle_plan(self) -> DecodePlan:
    """A plan to be filled in."""
    return DecodePlan.idle(self.slots, self.config.chunk_tokens, self.config.max_stop_ids)

  def place(self, snapshot: Snapshot | None, slots: Sequence[int]) -> None:
    """Puts one context, None an empty one, into every one of ``slots``."""
    snapshot = snapshot or self._blank
    self.store.touch(snapshot)
    width = self.programs.place_width
    for start in range(0, len(slots), width):
      self._place(snapshot, slots[start : start + width])
    self.lengths[list(slots)] = snapshot.length

  def read(self, slot: int, known: Sequence[Stored] = ()) -> Snapshot:
    """A copy of the context in ``slot``; ``known`` are its first blocks where they are stored."""
    length = int(self.lengths[slot])
    blocks = list(known)
    if self.programs.has_blocks:
      blocks += self._read_blocks(slot, len(blocks), -(-length // self.programs.block_tokens))
    version = -1 if self._weights is None else self._weights.versions[self.policies[slot]]
    state = self.store.add(self._read_state(slot))
    return Snapshot(state, tuple(blocks), length, version)

  def cut(self, snapshot: Snapshot, tokens: int) -> Snapshot:
    """The first ``tokens`` of a context; fewer than it holds only for models that only attend.

    At least one token must follow then: the logits are not those after ``tokens``.
    """
    if tokens == snapshot.length:
      return snapshot
    assert self.programs.attention_only
    _, logits = snapshot.state.arrays
    state = self.store.add((np.asarray([tokens], np.int32), logits))
    blocks = -(-tokens // self.programs.block_tokens)
    return Snapshot(state, snapshot.blocks[:blocks], tokens, snapshot.version)

  def extend(self, runs: Sequence[tuple[int, np.ndarray]]) -> list[Routed]:
    """Appends ids to contexts: pairs (slot, int32 ids), all in as few dispatches as possible.

    Several runs of one slot are appended one after the other, each in its own bucket.

    Returns:
      What the routers chose, in the order of the tokens; empty unless ``record_experts``.

    Raises:
      ContextLengthError: a context would hold more than ``max_length`` tokens.
    """
    params = self.weights.params
    pieces: dict[int, list[np.ndarray]] = {}
    largest = self.config.extend_buckets[-1]
    for slot, ids in runs:
      cuts = range(0, len(ids), largest)
      pieces.setdefault(slot, []).extend(ids[cut : cut + largest] for cut in cuts)
    for slot, queue in pieces.items():
      self._check_room(slot, sum(map(len, queue)))
    routed: list[Routed] = []
    while any(pieces.values()):
      by_bucket: dict[int, list[tuple[int, np.ndarray]]] = {}
      for slot, queue in pieces.items():
        if queue:
          ids = queue.pop(0)
          bucket = next(b for b in self.config.extend_buckets if b >= len(ids))
          by_bucket.setdefault(bucket, []).append((slot, ids))
      for bucket, items in by_bucket.items():
        rows = self.programs.extend_rows[bucket]
        program = self.programs.extend[bucket]
        for start in range(0, len(items), rows):
          part = items[start : start + rows]
          given = self._rows(part, rows, bucket)
          self._state, experts = program(self._state, params, *given)
          self._count(program)
          for row, (slot, ids) in enumerate(part):
            if experts is not None:
              routed.append(Routed(slot, int(self.lengths[slot]), experts, row, len(ids)))
            self.lengths[slot] += len(ids)
    return routed

  def decode(self, plan: DecodePlan) -> Chunk:
    """Runs one chunk for all slots with a budget and waits for it.

    A slot's budget must not pass the room left in its context. Where more grammars are at work than
    the table holds, some slots draw nothing in this chunk.
    """
    full = np.flatnonzero(self.lengths + plan.budget > self.config.max_length)
    if full.size:
      raise ContextLengthError(
        f"slot {full[0]} holds {self.lengths[full[0]]} tokens and is to sample "
        f"{plan.budget[full[0]]}; allowed: engine.max_length={self.config.max_length}."
      )
    if self._grammars is not None:
      masks, waiting = self._grammars.masks(plan.grammars)
      plan.budget[waiting] = 0
      plan = plan._replace(grammars=masks)
    if self._by_policy:
      plan = plan._replace(policies=self.policies.copy())
    self._state, chunk = self.programs.decode(self._state, self.weights.params, plan)
    self._count(self.programs.decode)
    chunk = jax.device_get(chunk)
    self.lengths += chunk.counts
    return chunk

  def _room(self, slot: int) -> int:
    return self.config.max_length - int(self.lengths[slot])

  def _check_room(self, slot: int, tokens: int) -> None:
    if tokens > self._room(slot):
      raise ContextLengthError(
        f"a context of {self.lengths[slot]} tokens cannot take {tokens} more; allowed: "
        f"engine.max_length={self.config.max_length} tokens in all."
      )

  def _rows(
    self, items: Sequence[tuple[int, np.ndarray]], rows: int, tokens: int
  ) -> tuple[np.ndarray | None, ...]:
    """Slots [rows], right-padded ids [rows, tokens], counts and policies [rows] of one dispatch."""
    slots = np.full(rows, self.slots, np.int32)
    token_ids = np.zeros((rows, tokens), np.int32)
    counts = np.zeros(rows, np.int32)
    for row, (slot, ids) in enumerate(items):
      slots[row], counts[row] = slot, len(ids)
      token_ids[row, : len(ids)] = ids
    policies = self.policies[np.minimum(slots, self.slots - 1)] if self._by_policy else None
    return slots, token_ids, counts, policies

  def _place(self, snapshot: Snapshot, slots: Sequence[int]) -> None:
    rows = np.zeros(self.programs.place_width, np.int32)
    rows[: len(slots)] = slots
    state = self.home.put(snapshot.state.arrays, self.programs.state_spec)
    self._state = self.programs.place(self._state, state, rows, np.int32(len(slots)))
    self._count(self.programs.place)
    at_once = self.programs.transfer_blocks
    for first in range(0, len(snapshot.blocks), at_once):
      blocks = [b.arrays for b in snapshot.blocks[first : first + at_once]]
      self._write(self.home.put(blocks, [self.programs.block_spec] * len(blocks)), first, slots)

  def _write(self, blocks: Sequence[tuple[Any, ...]], first: int, slots: Sequence[int]) -> None:
    if not self.programs.has_blocks:
      return
    rows = np.zeros(self.programs.place_width, np.int32)
    rows[: len(slots)] = slots
    filled = (*blocks, *self._filler[len(blocks) :])
    counts = np.int32(len(blocks)), rows, np.int32(len(slots))
    self._state = self.programs.write(self._state, filled, np.int32(first), *counts)
    self._count(self.programs.write)

  def _read_state(self, slot: int) -> tuple[Any, ...]:
    self._count(self.programs.read)
    return self.programs.read(self._state, np.int32(slot))

  def _read_blocks(self, slot: int, first: int, end: int) -> list[Stored]:
    """Blocks ``first`` to ``end`` of a slot."""
    if not self.programs.has_blocks:
      return []
    at_once = self.programs.transfer_blocks
    stored = []
    for start in range(first, end, at_once):
      blocks = self.programs.read_blocks(self._state, np.int32(slot), np.int32(start))
      self._count(self.programs.read_blocks)
      stored += [self.store.add(arrays) for arrays in blocks[: end - start]]
    return stored

  def _count(self, program: Any) -> None:
    self.dispatches[program.__name__] += 1


def make_store(config: EngineConfig) -> Store:
  """A store of the sizes in ``config``."""
  return Store(config.device_store_mb << 20, config.host_store_mb << 20)


def token_array(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
  """int32 ids, checked to be a non-empty run of the vocabulary."""
  ids = np.asarray(token_ids, np.int32)
  if ids.ndim != 1 or not ids.size:
    raise ValueError(f"token ids must be a non-empty flat sequence, got shape {ids.shape}.")
  if ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      f"token ids must be in 0..{vocab_size - 1} (model.vocab_size={vocab_size}), got "
      f"{ids.min()}..{ids.max()}."
    )
  return ids
