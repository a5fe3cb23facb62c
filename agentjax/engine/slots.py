"""The device side: a fixed number of slots, each one live context, driven from one thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agentjax.config import check
from agentjax.engine.config import EngineConfig
from agentjax.engine.device import LaneDevice
from agentjax.engine.grammar import GrammarTable
from agentjax.engine.home import Home, make_homes
from agentjax.engine.mirror import Mirror, SharedDevice
from agentjax.engine.pages import Pages
from agentjax.engine.programs import programs_of_lane
from agentjax.engine.publish import Publisher, Weights
from agentjax.engine.request import (
  Chunk,
  ContextLengthError,
  DecodePlan,
  EngineError,
)
from agentjax.engine.store import HeldPiece, Snapshot, Store, Stored
from agentjax.engine.table import Table
from agentjax.models import (
  ModelConfig,
  Params,
  num_routers,
  undraftable,
  unverifiable,
)
from agentjax.models.pieces import Layout, Piece, cut_pages, lay_out, states, unjoinable


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
  its own; in layers with a window, those that it has passed by are others'. Where pages run short,
  stored pages that no slot holds move to the store; the caller makes sure (``Pages.available``)
  that these suffice.

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
    mirror, number: for a lane in several processes, see ``SharedDevice``.

  Attributes:
    policies: int [slots], whose adapters each slot runs with.
    lengths: int [slots], tokens each slot holds, without those of a dispatch that was not read yet.
    tables: the pages of each slot, by layers (``Programs.layers``).
    pools: the pages of each table and way.
    device: its arrays and programs.
    warm: every program is compiled; one more compilation is a fault.
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
    mirror: Mirror | None = None,
    number: int = 0,
  ) -> None:
    self._check(model_config, config)
    # Frozen copies: compiled programs are shared by these values.
    self.model_config = ModelConfig.from_dict(model_config.to_dict()).freeze()
    self.config = EngineConfig.from_dict(config.to_dict()).freeze()
    self.home = home or make_homes(self.config, None)[0]
    self.programs = programs_of_lane(self.model_config, self.config, vocab_limit, self.home.mesh)
    config.requirements("engine")(
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
    self._entries = np.zeros(self.programs.table_shape, np.int32)
    self.tables = [
      Table(layers, entries, self.programs.ways)
      for layers, entries in zip(self.programs.layers, self._entries, strict=False)
    ]
    self.pools = [pool for table in self.tables for pool in table.pools]
    self._plain = lay_out((), self.programs.block_tokens, self.programs.entries)
    self._layouts: list[Layout | None] = [None] * self.slots
    for slot in range(self.slots):
      self._lay_out(slot, None)
    self.device = (
      LaneDevice(self.programs, self.home)
      if mirror is None
      else SharedDevice(self.programs, self.home, mirror, number)
    )
    self._grammars: GrammarTable | None = None
    if config.grammar_states:
      self._grammars = GrammarTable(self.config, self.slots, model_config.vocab_size)
    self.warm = False
    self.store = store or make_store(self.config)
    nothing = ((),) * len(self.tables)
    self._blank = Snapshot(self.store.add(self.device.read(0)), nothing, 0, -1)

  @staticmethod
  def _check(model_config: ModelConfig, config: EngineConfig) -> None:
    """What an engine refuses of its configs, before anything is compiled."""
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
    require(
      config.weight_dtype is None or not model_config.exact_chunk,
      "weight_dtype",
      f"None with exact log-probs (model.exact_chunk={model_config.exact_chunk}): training rounds "
      "no weights",
    )
    if not config.pieces:
      return
    reason = unjoinable(model_config)
    require(reason is None, "pieces", f"False for a model with {reason}")
    split = config.mesh.data * config.mesh.expert
    require(split == 1, "pieces", f"False with slots in {split} parts (engine.mesh)")
    require(config.speculate == "none", "speculate", "'none' with engine.pieces=True")
    require(not config.record_experts, "record_experts", "False with engine.pieces=True")

  @property
  def weights(self) -> Weights:
    """The weights in use."""
    return self.device.in_use

  def publish(self, params: Params, version: int) -> None:
    """Copies new training parameters, of number ``version``, for all later dispatches.

    They may be sharded; if they span processes, all processes must call this together.
    """
    self.use(Publisher({self.home: self.programs})(params, version)[self.home])

  def use(self, weights: Weights | None) -> None:
    """Switches to prepared weights; None frees those in use."""
    if weights is not self.device.weights:
      self.device.use(weights)

  def executables(self) -> tuple[str, ...]:
    """Names of all compiled programs; requests add none but ``Programs.join``, for pieces."""
    return self.device.executables()

  def warmup(self) -> None:
    """Compiles every program by running it on no slot. Needs weights."""
    self._place_state(self._blank, [])
    self.device.read(0)
    for number in range(len(self.tables)):
      self.device.write(number, [])
      self.device.copy(number, [])
      self.device.read_pages(number, [])
    for tokens, rows in self.programs.extend_rows.items():
      self.device.extend(tokens, self._rows([], rows, tokens))
    self.decode(self.idle_plan())
    self.warm = True

  def idle_plan(self) -> DecodePlan:
    """A plan to be filled in."""
    config = self.config
    return DecodePlan.idle(
      self.slots, config.chunk_tokens, config.max_stop_ids, self.programs.table_shape
    )

  def way(self, slot: int) -> int:
    """The part of the mesh whose pages a slot takes."""
    return slot * self.programs.ways // self.slots

  def places(self, slot: int) -> int:
    """Places of a slot's pages up to its last token."""
    layout = self._layouts[slot]
    return int(self.lengths[slot]) + (0 if layout is None else layout.gap)

  def whole(self, places: int) -> int:
    """The number of first pages, of a context of ``places``, that do not change any more."""
    settled = max(0, places - self.programs.unsettled)
    return settled // self.programs.block_tokens if self.programs.has_blocks else 0

  def reaches(self, block: Stored) -> bool:
    """Whether this lane can read a stored piece; else another lane has to copy it out."""
    return block.arrays is not None or any(pool in block.pages for pool in self.pools)

  def place(self, snapshot: Snapshot | None, slots: Sequence[int]) -> None:
    """Puts a context (None: an empty one) into each of ``slots``."""
    snapshot = snapshot or self._blank
    self.store.touch(snapshot)
    for slot in slots:
      self.release(slot)
    width = self.programs.place_width
    for start in range(0, len(slots), width):
      self._place_state(snapshot, slots[start : start + width])
    for table, blocks in zip(self.tables, snapshot.blocks, strict=True):
      self._place_pages(table, blocks, snapshot.places, slots)
    self.lengths[list(slots)] = snapshot.length
    for slot in slots:
      self._lay_out(slot, snapshot.layout)

  def read(self, slot: int) -> Snapshot:
    """A copy of the context in ``slot``; both share the pages that do not change."""
    blocks = []
    for table in self.tables:
      pool, shared = table.pool(slot), self._settle(table, slot)
      changing = self._changing(table, slot)
      copies = [self._take(pool) for _ in changing]
      self._copy(table, list(zip(changing, copies, strict=True)))
      blocks.append((*shared, *(self._stored(pool, page) for page in copies)))
    return self._snapshot(slot, blocks)

  def leave(self, slot: int) -> Snapshot:
    """Takes the context out of ``slot``, with its pages; the slot is then free."""
    blocks = []
    for table in self.tables:
      pool, shared = table.pool(slot), self._settle(table, slot)
      changing = self._changing(table, slot)
      del table.own[slot][: len(changing)]
      blocks.append((*shared, *(self._stored(pool, page) for page in changing)))
    snapshot = self._snapshot(slot, blocks)
    self.release(slot)
    return snapshot

  def release(self, slot: int) -> None:
    """Gives a slot's pages back."""
    for table in self.tables:
      table.release(slot)
    self._lay_out(slot, None)
    self._tenants[slot] += 1

  def copy_out(self, blocks: Sequence[Stored]) -> None:
    """Copies pieces that only pages hold to the store as well."""
    at_once = self.programs.transfer_blocks
    inside = [b for b in dict.fromkeys(blocks) if b.arrays is None]
    assert all(map(self.reaches, inside)), "other lanes copy out what is theirs"
    for table in self.tables:
      own = [(block, page) for block in inside if (page := table.page(block)) is not None]
      for start in range(0, len(own), at_once):
        part = own[start : start + at_once]
        read = self.device.read_pages(table.layers.number, [page for _, page in part])
        for (block, _), arrays in zip(part, read, strict=False):
          self.store.fill(block, arrays)

  def cut(self, snapshot: Snapshot, tokens: int) -> Snapshot:
    """The first ``tokens`` of a context; fewer than it holds only if ``may_cut``.

    At least one token must follow a cut: the logits are not those after ``tokens``.
    """
    if tokens == snapshot.length:
      return snapshot
    assert self.may_cut(snapshot, tokens)
    assert snapshot.state.arrays is not None
    state = self.store.add((np.asarray([tokens], np.int32), *snapshot.state.arrays[1:]))
    pages, blocks = self.programs.pages_of, []
    for layers, held in zip(self.programs.layers, snapshot.blocks, strict=True):
      first = pages(snapshot.length) - len(held)
      blocks.append(held[layers.passed(tokens) - first : pages(tokens) - first])
    return Snapshot(state, tuple(blocks), tokens, snapshot.version)

  def may_cut(self, snapshot: Snapshot, tokens: int) -> bool:
    """Whether the first ``tokens`` of a context can be had from it.

    It has nothing but keys and values, and in layers with a window still those that its first
    ``tokens`` end in.
    """
    pages = self.programs.pages_of(snapshot.length)
    both = zip(self.programs.layers, snapshot.blocks, strict=True)
    held = all(layers.passed(tokens) >= pages - len(blocks) for layers, blocks in both)
    return self.programs.attention_only and held

  def keep_piece(self, piece: Piece, version: int) -> HeldPiece:
    """A piece, made by weights of ``version``, as pages that any context may begin with."""
    blocks: list[Stored] = []
    if self.programs.has_blocks:
      pages = jax.tree.leaves(cut_pages(piece, self.programs.block_tokens))
      for arrays in self.programs.flat_blocks(pages):
        blocks.append(self.store.add(arrays, on_host=True))
    return HeldPiece(tuple(blocks), states(piece.entries), piece.length, version)

  def join(self, pieces: Sequence[HeldPiece], before: Snapshot | None = None) -> Snapshot:
    """Pieces in a row behind a context, as a context; no pages are copied.

    What stands before them keeps its pages, of which the last may stay filled in part.

    Raises:
      ContextLengthError: they leave no room for another token.
      EngineError: they were made by other weights than those in use.
    """
    programs, versions = self.programs, {piece.version for piece in pieces}
    if versions != set(self.weights.versions[:1]):
      raise EngineError(
        f"pieces of the versions {sorted(versions)} cannot be joined by weights of version "
        f"{self.weights.versions[0]}: make them again."
      )
    lengths, begins, own, blocks = self._split(before)
    lengths += [piece.length for piece in pieces]
    begins += [0] * len(pieces)
    total = sum(lengths)
    places = sum(programs.pages_of(n) * programs.block_tokens for n in lengths)
    if max(places, total) >= programs.max_tokens:
      raise ContextLengthError(
        f"{len(lengths)} pieces of {total} tokens take {places} places in pages of "
        f"{programs.block_tokens} and leave no room; allowed: fewer than {self.limit}."
      )
    layout = self._plain
    if programs.has_blocks:
      layout = lay_out(lengths, programs.block_tokens, programs.entries, begins)
    own += [piece.states for piece in pieces]
    starts = np.zeros(len(own), np.int32)  # nothing that lies outside pages has a position
    joined = programs.join(self.weights.params, own, starts) if jax.tree.leaves(own) else own[0]
    assert self._blank.state.arrays is not None
    state = programs.state_of(self._blank.state.arrays, joined, total)
    blocks += [block for piece in pieces for block in piece.blocks]
    version = versions.pop()
    if before is not None and before.version != version:
      version = -1
    each = (tuple(blocks),) * len(self.tables)
    return Snapshot(self.store.add(state), each, total, version, layout)

  def _split(
    self, context: Snapshot | None
  ) -> tuple[list[int], list[int], list[Any], list[Stored]]:
    """A context as pieces, the last of which stands where it was computed.

    Returns:
      Length and begin of each; the states of all of them together, if any; all blocks.
    """
    if context is None:
      return [], [], [], []
    layout = context.layout or self._plain
    lengths, begins = list(layout.lengths), list(layout.begins)
    if (rest := context.length - sum(lengths)) > 0:
      begins.append(sum(lengths))
      lengths.append(rest)
    state = self.home.put(context.state.arrays, self.programs.state_spec)
    return lengths, begins, [self.programs.entries_of(state)], list(context.stored)

  def extend(self, runs: Sequence[tuple[int, np.ndarray]]) -> list[Routed]:
    """Appends ids to contexts: pairs (slot, int32 ids), all in as few dispatches as possible.

    Several runs of one slot are appended one after the other, each in its own bucket.

    Returns:
      What the routers chose, in the order of the tokens; empty unless ``record_experts``.

    Raises:
      ContextLengthError: a context would hold more tokens than it may.
    """
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
        for start in range(0, len(items), rows):
          part = items[start : start + rows]
          self._grow((slot, self.places(slot) + len(ids)) for slot, ids in part)
          experts = self.device.extend(bucket, self._rows(part, rows, bucket))
          for row, (slot, ids) in enumerate(part):
            if experts is not None:
              routed.append(Routed(slot, int(self.lengths[slot]), experts, row, len(ids)))
            self.lengths[slot] += len(ids)
            self._pass_by(slot)
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
    reached = np.array(list(map(self.places, range(self.slots)))) + before + plan.budget
    full = np.flatnonzero(reached > self.programs.max_tokens)
    if full.size:
      raise ContextLengthError(
        f"slot {full[0]} holds {self.lengths[full[0]] + before[full[0]]} tokens and is to sample "
        f"{plan.budget[full[0]]}; allowed: {self.limit}."
      )
    if self._grammars is not None:
      masks, waiting = self._grammars.masks(plan.grammars, self.device.put)
      plan.budget[waiting] = 0
      plan = plan._replace(grammars=masks)
    self._grow((slot, int(reached[slot])) for slot in map(int, np.flatnonzero(plan.budget)))
    plan = plan._replace(tables=self._entries.copy())
    if self._by_policy:
      plan = plan._replace(policies=self.policies.copy())
    chunk = self.device.decode(plan)
    self._under_way = Drawing(chunk, plan.budget, self._tenants.copy())
    return self._under_way

  def end(self, drawing: Drawing, chunk: Chunk) -> None:
    """Counts what a dispatch drew, in the order of the dispatches."""
    same = drawing.tenants == self._tenants
    self.lengths[same] += chunk.counts[same]
    for slot in map(int, np.flatnonzero(same & (chunk.counts > 0))):
      self._pass_by(slot)
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
    if tokens > self.programs.max_tokens - self.places(slot):
      raise ContextLengthError(
        f"a context of {self.lengths[slot]} tokens cannot take {tokens} more; allowed: "
        f"{self.limit}."
      )

  def _rows(
    self, items: Sequence[tuple[int, np.ndarray]], rows: int, tokens: int
  ) -> tuple[np.ndarray | None, ...]:
    """What ``extend`` takes: slots [rows], right-padded ids [rows, tokens], counts [rows], tables
    of pages and policies [rows]."""
    slots = np.full(rows, self.slots, np.int32)
    token_ids = np.zeros((rows, tokens), np.int32)
    counts = np.zeros(rows, np.int32)
    for row, (slot, ids) in enumerate(items):
      slots[row], counts[row] = slot, len(ids)
      token_ids[row, : len(ids)] = ids
    policies = self.policies[np.minimum(slots, self.slots - 1)] if self._by_policy else None
    return slots, token_ids, counts, self._entries.copy(), policies

  def _place_state(self, snapshot: Snapshot, slots: Sequence[int]) -> None:
    assert snapshot.state.arrays is not None
    self.device.place(snapshot.state.arrays, slots)

  def _place_pages(
    self, table: Table, blocks: Sequence[Stored], places: int, slots: Sequence[int]
  ) -> None:
    """Gives empty slots a context's pages: those that do not change are shared, others copied."""
    first = self.programs.pages_of(places) - len(blocks)
    whole = self.whole(places) - first
    shared, changing = blocks[:whole], blocks[whole:]
    for slot in slots:  # first, so that none of these is moved to make room
      for block in shared:
        if table.pool(slot) in block.pages:
          table.pool(slot).hold(block)
    missing = {
      (table.pool(slot), block): 0
      for slot in slots
      for block in shared
      if table.pool(slot) not in block.pages
    }
    for pool, block in missing:
      missing[pool, block] = self._take(pool)
    own = {slot: [self._take(table.pool(slot)) for _ in changing] for slot in slots}
    moves = [(block, page) for (_, block), page in missing.items()]
    for slot in slots:
      moves += zip(changing, own[slot], strict=True)
    copies, writes = [], []
    for block, page in moves:  # only now: taking pages may have moved others
      source = table.page(block)
      if source is None:
        writes.append((block.arrays, page))
      else:
        copies.append((source, page))
    self._write(table, writes)
    self._copy(table, copies)
    held = set(missing)
    for (pool, block), page in missing.items():
      pool.store(block, page)
    for slot in slots:
      pool = table.pool(slot)
      for block in shared:
        if (pool, block) in held:
          pool.hold(block)
      table.share(slot, first, list(shared))
      for page in own[slot]:
        table.append(slot, page)

  def _settle(self, table: Table, slot: int) -> list[Stored]:
    """Stores a slot's own pages that do not change any more; returns all its stored ones."""
    pool, shared, own = table.pool(slot), table.shared[slot], table.own[slot]
    settled = self.whole(self.places(slot)) - table.first[slot]
    for _ in range(settled - len(shared)):
      shared.append(self._stored(pool, own.pop(0)))
      pool.hold(shared[-1])
    return shared

  def _changing(self, table: Table, slot: int) -> list[int]:
    """A settled slot's own pages that hold tokens."""
    filled = self.programs.pages_of(self.places(slot)) - table.first[slot]
    return table.own[slot][: filled - len(table.shared[slot])]

  def _pass_by(self, slot: int) -> None:
    """Gives back the pages that a slot's last tokens have moved away from."""
    for table in self.tables:
      table.pass_by(slot, int(self.lengths[slot]))

  def _stored(self, pool: Pages, page: int) -> Stored:
    stored = self.store.add(None)
    pool.store(stored, page)
    return stored

  def _snapshot(self, slot: int, blocks: Iterable[tuple[Stored, ...]]) -> Snapshot:
    weights = self.device.weights
    version = -1 if weights is None else weights.versions[self.policies[slot]]
    state = self.store.add(self.device.read(slot))
    length, layout = int(self.lengths[slot]), self._layouts[slot]
    return Snapshot(state, tuple(blocks), length, version, layout)

  def _lay_out(self, slot: int, layout: Layout | None) -> None:
    """Notes where the pages of a slot stand."""
    self._layouts[slot] = layout
    if self.config.pieces:
      laid_out = jax.tree.leaves((layout or self._plain).pieces)
      self._entries[len(self.tables) :, slot] = laid_out

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
    """Gives slots pages for so many places in all.

    They are filled with zeros: a NaN left by another context would reach sums even if masked.
    """
    wanted = list(wanted)
    for table in self.tables:
      fresh = []
      for slot, places in wanted:
        pool = table.pool(slot)
        for _ in range(table.end(slot), self.programs.pages_of(places)):
          page = self._take(pool)
          table.append(slot, page)
          fresh.append((pool.empty, page))
      self._copy(table, fresh)

  def _copy(self, table: Table, pairs: Sequence[tuple[int, int]]) -> None:
    for start in range(0, len(pairs), self.programs.copies):
      self.device.copy(table.layers.number, pairs[start : start + self.programs.copies])

  def _write(self, table: Table, pairs: Sequence[tuple[Any, int]]) -> None:
    for start in range(0, len(pairs), self.programs.transfer_blocks):
      some = pairs[start : start + self.programs.transfer_blocks]
      self.device.write(table.layers.number, some)


def make_store(config: EngineConfig) -> Store:
  """A store of the sizes in ``config``."""
  return Store(config.device_store_mb << 20, config.host_store_mb << 20)


def token_array(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
  """int32 ids, checked to be a non-empty run of the vocabulary."""
  ids = np.asarray(token_ids)
  if ids.ndim != 1 or not ids.size:
    raise ValueError(f"token ids must be a non-empty flat sequence, got shape {ids.shape}.")
  if ids.dtype.kind not in "iu":
    raise ValueError(f"token ids must be whole numbers below 2^63, got {ids.dtype}.")
  if ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      f"token ids must be in 0..{vocab_size - 1} (model.vocab_size={vocab_size}), got "
      f"{ids.min()}..{ids.max()}."
    )
  return ids.astype(np.int32)
