"""The device side: a fixed number of slots, each one live context, driven from one thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agentjax.config import check
from agentjax.engine.config import EngineConfig
from agentjax.engine.grammar import GrammarTable
from agentjax.engine.home import Home, make_homes
from agentjax.engine.pages import Pages
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


class Drawing(NamedTuple):
  """A decode dispatch that may not have ended yet."""

  dispatched: Chunk  # on the device
  budget: np.ndarray  # int [slots], tokens at most
  tenants: np.ndarray  # int [slots], who was in each slot

  def chunk(self) -> Chunk:
    """What it gave; waits for it."""
    return jax.device_get(self.dispatched)


class SlotEngine:
  """Slots of one lane. Not thread safe; only ``decode`` waits for the device.

  A slot's first pages may be stored and shared with others; its last pages, which still change, are
  its own. Where pages run short, stored pages that no slot holds move to the store; the caller
  makes sure (``Pages.available``) that these suffice.

  The compiled shapes depend on the configs alone: an extension runs in the bucket of its own
    length, a decode dispatch always spans all slots. So a context's results do not depend on its
    slot, on its neighbours or on the order of the work, bit for bit.

  Args:
    model_config: of the parameters to be published.
    config: ``slots / lanes`` slots are made.
    home: its devices; None is those of the first lane on the local devices.
    vocab_limit: ids from here on are never drawn; None allows all of the model's vocabulary.
    store: counts what is read; shared by the lanes of an engine.
    by_policy: several policies have adapters of their own over one base.

  Attributes:
    policies: int [slots], whose adapters each slot runs with.
    lengths: int [slots], tokens each slot holds, without those of a dispatch that was not read yet.
    pools: the pages of each way.
    warm: every program is compiled; one more compilation is a fault.
    dispatches: programs run so far, by name.
    first_dispatch: ``time.perf_counter`` of the first of them since it was last None.
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
    require = config.requirements("engine")
    require(
      not config.record_experts or num_routers(model_config) > 0,
      "record_experts",
      f"False for a model without routers (model.pattern={model_config.pattern!r})",
    )
    reason = unverifiable(model_config)
    require(config.speculate == "none" or reason is None, "speculate", f"'none' with {reason}")
    reason = undraftable(model_config)
    require(
      config.speculate != "mtp" or reason is None, "speculate", f"'none' or 'ngram' with {reason}"
    )
    check(
      not model_config.exact_chunk or config.mesh.size == 1,
      "engine.mesh",
      config.mesh.to_dict(),
      f"1 along every axis with model.exact_chunk={model_config.exact_chunk}: sums over devices do "
      "not round as training does",
    )
    require(
      config.cache_dtype is None or not model_config.exact_chunk,
      "cache_dtype",
      f"None with exact log-probs (model.exact_chunk={model_config.exact_chunk}): training rounds "
      "neither keys nor values",
    )
    # Frozen copies: compiled programs are shared by these values.
    self.model_config = ModelConfig.from_dict(model_config.to_dict()).freeze()
    self.config = EngineConfig.from_dict(config.to_dict()).freeze()
    self.home = home or make_homes(self.config, None)[0]
    self.programs = programs_of_lane(self.model_config, self.config, vocab_limit, self.home.mesh)
    require(
      config.cache_dtype is None or self.programs.has_blocks,
      "cache_dtype",
      "None for a model that keeps no keys and values in pages "
      f"(model.pattern={model_config.pattern!r})",
    )
    self.slots = self.programs.slots
    self.lengths, self.policies = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.int32)
    self._tenants = np.zeros(self.slots, np.int64)  # how often each slot was given up
    self._under_way: Drawing | None = None
    self._by_policy = by_policy
    count = self.programs.pages
    self.pools = [Pages(way * count, count) for way in range(self.programs.ways)]
    self._shared: list[list[Stored]] = [[] for _ in range(self.slots)]
    self._own: list[list[int]] = [[] for _ in range(self.slots)]
    empty = [self.pool(slot).empty for slot in range(self.slots)]
    self._table = np.tile(np.array(empty, np.int32)[:, None], (1, self.programs.entries))
    self.dispatches = dict.fromkeys(self.executables(), 0)
    self.first_dispatch: float | None = None
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
      none = np.zeros(self.programs.transfer_blocks, np.int32)
      filler = self.programs.read_blocks(self._state, none)
      self._filler = filler if self.home.mesh else self.home.put(filler)

  @property
  def weights(self) -> Weights:
    """The weights in use."""
    if self._weights is None:
      raise EngineError("no weights yet: call publish(params, version) first.")
    return self._weights

  def publish(self, params: Params, version: int) -> None:
    """Copies new training parameters, of number ``version``, for all later dispatches.

    They may be sharded; if they span processes, all processes must call this together.
    """
    self.use(Publisher({self.home: self.programs})(params, version)[self.home])

  def use(self, weights: Weights | None) -> None:
    """Switches to prepared weights; None frees those in use."""
    self._weights = weights

  def executables(self) -> tuple[str, ...]:
    """Names of all compiled programs; no request makes another one."""
    moving = ("copy", "write", "read_blocks") if self.programs.has_blocks else ()
    extend = (program.__name__ for program in self.programs.extend.values())
    return ("place", "read", *moving, "decode", *extend)

  def warmup(self) -> None:
    """Compiles every program by running it on no slot. Needs weights."""
    params = self.weights.params
    self._place_state(self._blank, [])
    self._read_state(0)
    if self.programs.has_blocks:
      self._write_some([])
      self._copy_some([])
      self._read_pages([])
    for tokens, rows in self.programs.extend_rows.items():
      empty = self._rows([], rows, tokens)
      self._state, _ = self.programs.extend[tokens](self._state, params, *empty)
    self.decode(self.idle_plan())
    self.warm = True

  def idle_plan(self) -> DecodePlan:
    """A plan to be filled in."""
    config = self.config
    return DecodePlan.idle(
      self.slots, config.chunk_tokens, config.max_stop_ids, self.programs.entries
    )

  def pool(self, slot: int) -> Pages:
    """The pages that a slot takes from."""
    return self.pools[slot * len(self.pools) // self.slots]

  def pages(self, slot: int) -> int:
    """Pages that a slot has."""
    return len(self._shared[slot]) + len(self._own[slot])

  def shared(self, slot: int) -> Sequence[Stored]:
    """Its first pages, as far as they are stored."""
    return self._shared[slot]

  def whole(self, tokens: int) -> int:
    """The number of first pages, of a context of ``tokens``, that do not change any more."""
    settled = max(0, tokens - self.programs.unsettled)
    return settled // self.programs.block_tokens if self.programs.has_blocks else 0

  def reaches(self, block: Stored) -> bool:
    """Whether this lane can read a stored piece; else another lane has to copy it out."""
    return block.arrays is not None or self._page(block) is not None

  def place(self, snapshot: Snapshot | None, slots: Sequence[int]) -> None:
    """Puts a context (None: an empty one) into each of ``slots``."""
    snapshot = snapshot or self._blank
    self.store.touch(snapshot)
    for slot in slots:
      self.release(slot)
    width = self.programs.place_width
    for start in range(0, len(slots), width):
      self._place_state(snapshot, slots[start : start + width])
    self._place_pages(snapshot, slots)
    self.lengths[list(slots)] = snapshot.length

  def read(self, slot: int) -> Snapshot:
    """A copy of the context in ``slot``; both share the pages that do not change."""
    pool, shared = self.pool(slot), self._settle(slot)
    changing = self._own[slot][: self.programs.pages_of(int(self.lengths[slot])) - len(shared)]
    copies = [self._take(pool) for _ in changing]
    self._copy(list(zip(changing, copies, strict=True)))
    return self._snapshot(slot, [*shared, *(self._stored(pool, page) for page in copies)])

  def leave(self, slot: int) -> Snapshot:
    """Takes the context out of ``slot``, with its pages; the slot is then free."""
    pool, shared = self.pool(slot), self._settle(slot)
    own, used = self._own[slot], self.programs.pages_of(int(self.lengths[slot])) - len(shared)
    self._own[slot] = own[used:]
    snapshot = self._snapshot(slot, [*shared, *(self._stored(pool, page) for page in own[:used])])
    self.release(slot)
    return snapshot

  def release(self, slot: int) -> None:
    """Gives a slot's pages back."""
    pool = self.pool(slot)
    for block in self._shared[slot]:
      pool.loosen(block)
    for page in self._own[slot]:
      pool.give(page)
    self._shared[slot], self._own[slot] = [], []
    self._table[slot] = pool.empty
    self._tenants[slot] += 1

  def copy_out(self, blocks: Sequence[Stored]) -> None:
    """Copies pieces that only pages hold to the store as well."""
    at_once = self.programs.transfer_blocks
    inside = [b for b in dict.fromkeys(blocks) if b.arrays is None]
    for start in range(0, len(inside), at_once):
      part = inside[start : start + at_once]
      pages = [page for page in map(self._page, part) if page is not None]
      assert len(pages) == len(part), "other lanes copy out what is theirs"
      for block, arrays in zip(part, self._read_pages(pages), strict=False):
        self.store.fill(block, arrays)

  def cut(self, snapshot: Snapshot, tokens: int) -> Snapshot:
    """The first ``tokens`` of a context; fewer than it holds only if ``attention_only``.

    At least one token must follow a cut: the logits are not those after ``tokens``.
    """
    if tokens == snapshot.length:
      return snapshot
    assert self.programs.attention_only
    assert snapshot.state.arrays is not None
    state = self.store.add((np.asarray([tokens], np.int32), *snapshot.state.arrays[1:]))
    blocks = -(-tokens // self.programs.block_tokens)
    return Snapshot(state, snapshot.blocks[:blocks], tokens, snapshot.version)

  def extend(self, runs: Sequence[tuple[int, np.ndarray]]) -> list[Routed]:
    """Appends ids to contexts: pairs (slot, int32 ids), all in as few dispatches as possible.

    Several runs of one slot are appended one after the other, each in its own bucket.

    Returns:
      What the routers chose, in the order of the tokens; empty unless ``record_experts``.

    Raises:
      ContextLengthError: a context would hold more tokens than it may.
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
          self._grow((slot, int(self.lengths[slot]) + len(ids)) for slot, ids in part)
          given = self._rows(part, rows, bucket)
          self._state, experts = program(self._state, params, *given)
          self._count(program)
          for row, (slot, ids) in enumerate(part):
            if experts is not None:
              routed.append(Routed(slot, int(self.lengths[slot]), experts, row, len(ids)))
            self.lengths[slot] += len(ids)
    return routed

  def decode(self, plan: DecodePlan) -> Chunk:
    """``start``, a wait, and ``end``."""
    drawing = self.start(plan)
    chunk = drawing.chunk()
    self.end(drawing, chunk)
    return chunk

  def start(self, plan: DecodePlan) -> Drawing:
    """Dispatches one chunk for all slots with a budget.

    A slot's budget must not exceed the room left in its context. If more grammars are at work than
    the table holds, some slots draw nothing in this chunk.

    Rows with ``plan.ahead`` go on from the dispatch before, which ``end`` was not called for yet.
    Until it was, nothing else may be done with slots that still draw, but to give them up.
    """
    before = np.zeros(self.slots, np.int64)
    if plan.ahead.any():
      assert self._under_way is not None, "there is no dispatch to go on from"
      before = np.where(plan.ahead, self._under_way.budget, 0)
    reached = self.lengths + before + plan.budget
    full = np.flatnonzero(reached > self.programs.max_tokens)
    if full.size:
      raise ContextLengthError(
        f"slot {full[0]} holds {self.lengths[full[0]] + before[full[0]]} tokens and is to sample "
        f"{plan.budget[full[0]]}; allowed: {self.limit}."
      )
    if self._grammars is not None:
      masks, waiting = self._grammars.masks(plan.grammars)
      plan.budget[waiting] = 0
      plan = plan._replace(grammars=masks)
    self._grow((slot, int(reached[slot])) for slot in map(int, np.flatnonzero(plan.budget)))
    plan = plan._replace(table=self._table.copy())
    if self._by_policy:
      plan = plan._replace(policies=self.policies.copy())
    self._state, chunk = self.programs.decode(self._state, self.weights.params, plan)
    self._count(self.programs.decode)
    self._under_way = Drawing(chunk, plan.budget, self._tenants.copy())
    return self._under_way

  def end(self, drawing: Drawing, chunk: Chunk) -> None:
    """Counts what a dispatch drew, in the order of the dispatches."""
    same = drawing.tenants == self._tenants
    self.lengths[same] += chunk.counts[same]
    if self._under_way is drawing:
      self._under_way = None

  @property
  def limit(self) -> str:
    """What a context can hold, and the setting that decides it."""
    most, config = self.programs.max_tokens, self.config
    if most == config.max_length:
      return f"engine.max_length={most} tokens in all"
    return f"{most} tokens in all, a lane's share of engine.cache_tokens={config.cache_tokens}"

  def _check_room(self, slot: int, tokens: int) -> None:
    if tokens > self.programs.max_tokens - int(self.lengths[slot]):
      raise ContextLengthError(
        f"a context of {self.lengths[slot]} tokens cannot take {tokens} more; allowed: "
        f"{self.limit}."
      )

  def _rows(
    self, items: Sequence[tuple[int, np.ndarray]], rows: int, tokens: int
  ) -> tuple[np.ndarray | None, ...]:
    """What ``extend`` takes: slots [rows], right-padded ids [rows, tokens], counts [rows], table of
    pages and policies [rows]."""
    slots = np.full(rows, self.slots, np.int32)
    token_ids = np.zeros((rows, tokens), np.int32)
    counts = np.zeros(rows, np.int32)
    for row, (slot, ids) in enumerate(items):
      slots[row], counts[row] = slot, len(ids)
      token_ids[row, : len(ids)] = ids
    policies = self.policies[np.minimum(slots, self.slots - 1)] if self._by_policy else None
    return slots, token_ids, counts, self._table.copy(), policies

  def _place_state(self, snapshot: Snapshot, slots: Sequence[int]) -> None:
    rows = np.zeros(self.programs.place_width, np.int32)
    rows[: len(slots)] = slots
    state = self.home.put(snapshot.state.arrays, self.programs.state_spec)
    self._state = self.programs.place(self._state, state, rows, np.int32(len(slots)))
    self._count(self.programs.place)

  def _place_pages(self, snapshot: Snapshot, slots: Sequence[int]) -> None:
    """Gives empty slots a context's pages: those that do not change are shared, others copied."""
    whole = self.whole(snapshot.length)
    shared, changing = snapshot.blocks[:whole], snapshot.blocks[whole:]
    for slot in slots:  # first, so that none of these is moved to make room
      for block in shared:
        if self.pool(slot) in block.pages:
          self.pool(slot).hold(block)
    missing = {
      (self.pool(slot), block): 0
      for slot in slots
      for block in shared
      if self.pool(slot) not in block.pages
    }
    for pool, block in missing:
      missing[pool, block] = self._take(pool)
    for slot in slots:
      self._own[slot] = [self._take(self.pool(slot)) for _ in changing]
    moves = [(block, page) for (_, block), page in missing.items()]
    for slot in slots:
      moves += zip(changing, self._own[slot], strict=True)
    copies, writes = [], []
    for block, page in moves:  # only now: taking pages may have moved others
      source = self._page(block)
      if source is None:
        writes.append((block.arrays, page))
      else:
        copies.append((source, page))
    self._write(writes)
    self._copy(copies)
    held = set(missing)
    for (pool, block), page in missing.items():
      pool.store(block, page)
    for slot in slots:
      pool = self.pool(slot)
      for block in shared:
        if (pool, block) in held:
          pool.hold(block)
      self._shared[slot] = list(shared)
      pages = [block.pages[pool] for block in shared] + self._own[slot]
      self._table[slot, : len(pages)] = pages

  def _settle(self, slot: int) -> list[Stored]:
    """Stores a slot's own pages that do not change any more; returns all its stored ones."""
    pool, shared, own = self.pool(slot), self._shared[slot], self._own[slot]
    for _ in range(self.whole(int(self.lengths[slot])) - len(shared)):
      shared.append(self._stored(pool, own.pop(0)))
      pool.hold(shared[-1])
    return shared

  def _stored(self, pool: Pages, page: int) -> Stored:
    stored = self.store.add(None)
    pool.store(stored, page)
    return stored

  def _snapshot(self, slot: int, blocks: Iterable[Stored]) -> Snapshot:
    version = -1 if self._weights is None else self._weights.versions[self.policies[slot]]
    state = self.store.add(self._read_state(slot))
    return Snapshot(state, tuple(blocks), int(self.lengths[slot]), version)

  def _page(self, block: Stored) -> int | None:
    """A page of this lane that holds a stored piece, or None."""
    return next((p for p in map(block.pages.get, self.pools) if p is not None), None)

  def _take(self, pool: Pages) -> int:
    """A free page; if there is none, the longest unused pieces move out first."""
    page = pool.take()
    if page is None:
      moved = pool.longest_unused(self.programs.transfer_blocks)
      self.copy_out(moved)
      for block in moved:
        pool.release(block)
      page = pool.take()
    assert page is not None, "the caller sees to it that pages suffice"
    return page

  def _grow(self, wanted: Iterable[tuple[int, int]]) -> None:
    """Gives slots pages for so many tokens in all.

    They are filled with zeros: a NaN left by another context would reach sums even if masked.
    """
    fresh = []
    for slot, tokens in wanted:
      pool, pages = self.pool(slot), self.pages(slot)
      for entry in range(pages, self.programs.pages_of(tokens)):
        page = self._take(pool)
        self._table[slot, entry] = page
        self._own[slot].append(page)
        fresh.append((pool.empty, page))
    self._copy(fresh)

  def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
    for start in range(0, len(pairs), self.programs.copies):
      self._copy_some(pairs[start : start + self.programs.copies])

  def _copy_some(self, pairs: Sequence[tuple[int, int]]) -> None:
    both = np.zeros((2, self.programs.copies), np.int32)
    for i, pair in enumerate(pairs):
      both[:, i] = pair
    self._state = self.programs.copy(self._state, *both, np.int32(len(pairs)))
    self._count(self.programs.copy)

  def _write(self, pairs: Sequence[tuple[Any, int]]) -> None:
    for start in range(0, len(pairs), self.programs.transfer_blocks):
      self._write_some(pairs[start : start + self.programs.transfer_blocks])

  def _write_some(self, pairs: Sequence[tuple[Any, int]]) -> None:
    targets = np.zeros(self.programs.transfer_blocks, np.int32)
    targets[: len(pairs)] = [page for _, page in pairs]
    blocks = [arrays for arrays, _ in pairs]
    blocks = self.home.put(blocks, [self.programs.block_spec] * len(blocks))
    filled = (*blocks, *self._filler[len(blocks) :])
    self._state = self.programs.write(self._state, filled, targets, np.int32(len(pairs)))
    self._count(self.programs.write)

  def _read_state(self, slot: int) -> tuple[Any, ...]:
    self._count(self.programs.read)
    return self.programs.read(self._state, np.int32(slot))

  def _read_pages(self, pages: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
    """Contents of ``transfer_blocks`` pages, the first of which are ``pages``."""
    wanted = np.zeros(self.programs.transfer_blocks, np.int32)
    wanted[: len(pages)] = pages
    self._count(self.programs.read_blocks)
    return self.programs.read_blocks(self._state, wanted)

  def _count(self, program: Any) -> None:
    self.dispatches[program.__name__] += 1
    self.first_dispatch = self.first_dispatch or time.perf_counter()


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
