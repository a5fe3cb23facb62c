"""One lane: a block of slots, the calls that use them, and a thread that works in cycles."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from agentjax.engine.context_state import ContextState
from agentjax.engine.pace import Pace
from agentjax.engine.pages import Pages
from agentjax.engine.prefix_cache import Entry, PrefixCache, token_ids
from agentjax.engine.request import Chunk, DecodePlan, EngineError, Generation, SampleRequest
from agentjax.engine.slots import Drawing, Routed, SlotEngine, Weights
from agentjax.engine.store import Snapshot, Stored
from agentjax.engine.table import Table

_ticks = itertools.count()


class Job:
  """A call of a context: a generation, or (None) a snapshot of what it is."""

  def __init__(self, context: ContextState, generation: Generation | None) -> None:
    self.context = context
    self.generation = generation
    self.forcing: Generation | None = None  # sampled tokens on their way back in
    self.turn_base: Snapshot | None = None  # the context before the call
    self.placed = context.home is not None
    self.read_planned = False
    self.order: tuple[tuple[int, ...], int] = ((), 0)  # priority, then arrival
    self.future: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()

  @property
  def over(self) -> bool:
    """Ended, failed or dropped."""
    return self.future.done()

  @property
  def needs_read(self) -> bool:
    """Whether its context is still to be copied, once all that is pending is in it.

    The call asks for that; or a stop string may end the call where the device is past it already,
    and the context goes back to where the call began.
    """
    generation = self.generation
    return not self.read_planned and (generation is None or bool(generation.request.stop_strings))


@dataclasses.dataclass
class Read:
  """A context to copy out of its slot, and what the event loop then does with the copy."""

  slot: int
  use: Callable[[Snapshot], None]


@dataclasses.dataclass
class Round:
  """At most one piece for every slot, then copies of what the slots hold."""

  runs: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)
  reads: list[Read] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Row:
  """What a slot decodes in a cycle: at most ``budget`` tokens of ``generation``, for ``job``."""

  job: Job
  generation: Generation
  budget: int

  @property
  def ends(self) -> bool:
    """Whether the generation is over with these tokens, whatever they are."""
    return self.generation.sampled + self.budget >= self.generation.request.max_tokens


@dataclasses.dataclass
class Cycle:
  """Device work of one lane, in this order; plain data for its thread."""

  weights: Weights
  wanted: list[Stored]  # in pages here, and needed by other lanes
  evictions: list[Read]  # of slots that are given up
  leaving: list[ContextState]  # contexts of these evictions
  gone: list[int]  # slots whose contexts ended
  placements: list[tuple[Snapshot | None, list[int]]] = dataclasses.field(default_factory=list)
  rounds: list[Round] = dataclasses.field(default_factory=list)
  policies: dict[int, int] = dataclasses.field(default_factory=dict)  # by slot, of the placements
  running: dict[int, ContextState] = dataclasses.field(default_factory=dict)  # by slot, of the runs
  decoding: dict[int, Row] = dataclasses.field(default_factory=dict)  # by slot
  plan: DecodePlan | None = None
  reused: int = 0  # tokens taken from known prefixes
  parked: int = 0  # contexts that made way for lack of pages
  ahead: bool = False  # dispatched before the results of the cycle before it were read

  @property
  def empty(self) -> bool:
    """Whether there is nothing to do."""
    work = (self.wanted, self.evictions, self.gone, self.placements, self.rounds, self.plan)
    return not any(work)


class Results(NamedTuple):
  """What the device gave in a cycle, on the host."""

  experts: list[np.ndarray]
  chunk: Chunk | None
  end: float | None  # ``time.perf_counter`` when it was there; None without a chunk to wait for


@dataclasses.dataclass
class Running:
  """A cycle that was dispatched, and may be under way.

  Attributes:
    cycle: it.
    read: copies of contexts, and what is done with them.
    routed: what routers chose.
    drawing: its chunk.
    start: ``time.perf_counter`` when its first program was dispatched.
    results: what it gave.
  """

  cycle: Cycle
  read: list[tuple[Read, Snapshot]]
  routed: list[Routed]
  drawing: Drawing | None
  start: float
  results: asyncio.Future[Results] | None = None

  def wait(self) -> Results:
    """Waits for the device."""
    chunk = None if self.drawing is None else self.drawing.chunk()
    end = None if chunk is None else time.perf_counter()
    return Results([routed.experts() for routed in self.routed], chunk, end)


@dataclasses.dataclass(frozen=True)
class _Start:
  """Where a context without a slot begins."""

  base: Snapshot | None  # what it is, or a known beginning of it
  known: tuple[int, Entry] | None = None  # that beginning
  again: bool = False  # older weights computed its bare prefix

  @property
  def tokens(self) -> int:
    """What it then holds."""
    return self.known[0] if self.known else self.base.length if self.base else 0


@dataclasses.dataclass
class _Span:
  """Pages of a slot in a table, by their places: ``first`` to ``end``, its own from ``own`` on."""

  first: int = 0
  own: int = 0
  end: int = 0

  def pass_by(self, place: int) -> int:
    """Leaves out the pages before ``place``; returns how many of its own these are."""
    place = max(self.first, min(place, self.end))
    given = max(0, place - max(self.first, self.own))
    self.first, self.own = place, max(self.own, place)
    return given


class _Supply:
  """Pages that the slots of a lane may still take in a cycle.

  Args:
    slots: at rest.
    left: slots that are given up before any page is taken.
  """

  def __init__(self, slots: SlotEngine, left: Iterable[int]) -> None:
    self._slots = slots
    self._free = {pool: pool.available for pool in slots.pools}
    self._spans: dict[tuple[Table, int], _Span] = {}
    self._taken = dict.fromkeys(slots.pools, 0)
    self._copies: set[int] = set()  # slots that may be read
    self._holders: collections.Counter[tuple[Pages, Stored]] = collections.Counter()  # more of them
    for slot in left:
      self.give_up(slot)

  def _span(self, table: Table, slot: int) -> _Span:
    """What a slot has or will have."""
    if (table, slot) not in self._spans:
      first = table.first[slot]
      own = first + len(table.shared[slot])
      self._spans[table, slot] = _Span(first, own, table.end(slot))
    return self._spans[table, slot]

  def holds_any(self, slot: int) -> bool:
    """Whether a slot has or will have pages."""
    spans = (self._span(table, slot) for table in self._slots.tables)
    return any(span.end > span.first for span in spans)

  def places(self, slot: int) -> int:
    """Tokens of a context that its pages go to."""
    ends = (self._span(table, slot).end for table in self._slots.tables)
    return min(ends) * self._slots.programs.block_tokens

  def give_up(self, slot: int) -> None:
    """Counts what a slot leaves to others."""
    for table in self._slots.tables:
      pool, span = table.pool(slot), self._span(table, slot)
      if span.end > span.first:
        for block in table.shared[slot]:
          self._holders[pool, block] -= 1
          self._free[pool] += self._held_by(pool, block) == 0
        self._free[pool] += len(table.own[slot])
      self._spans[table, slot] = _Span()

  def _held_by(self, pool: Pages, block: Stored) -> int:
    return pool.holders(block) + self._holders[pool, block]

  def reach(
    self,
    slot: int,
    tokens: int,
    *,
    holding: int = 0,
    copies: bool = False,
    base: Snapshot | None = None,
  ) -> bool:
    """Takes pages for so many tokens, all or none.

    Args:
      slot: which.
      tokens: in all, places without one included (``ContextState.places``).
      holding: how many tokens it holds before it takes pages: it may leave some behind first.
      copies: to read the slot as well, beside what it goes on with.
      base: what is placed in it first.
    """
    programs = self._slots.programs
    spare = programs.pages_of(1 + programs.unsettled) if copies else 0
    wanted = []
    for number, table in enumerate(self._slots.tables):
      pool, span = table.pool(slot), self._span(table, slot)
      self._free[pool] += span.pass_by(table.layers.passed(holding))
      shared: Sequence[Stored] = ()
      if base is not None:
        first = programs.pages_of(base.places) - len(base.blocks[number])
        own = self._slots.whole(base.places)
        shared = base.blocks[number][: own - first]
        span = _Span(first, own, first)
      more = max(0, programs.pages_of(tokens) - span.end)
      more += spare - sum(self._held_by(pool, block) > 0 for block in shared)
      if more > self._free[pool]:
        return False
      end = max(span.end, programs.pages_of(tokens))
      wanted.append((table, pool, more, dataclasses.replace(span, end=end), shared))
    for table, pool, more, span, shared in wanted:
      self._free[pool] -= more
      self._taken[pool] += more
      self._spans[table, slot] = span
      self._holders.update((pool, block) for block in shared)
    if copies:
      self._copies.add(slot)
    return True

  def may_copy(self, slot: int) -> bool:
    """Whether there are pages to read a slot that goes on."""
    if slot in self._copies:
      self._copies.remove(slot)
      return True
    return self.reach(slot, 0, copies=True) and self.may_copy(slot)

  @property
  def moved_bytes(self) -> int:
    """Of the pages that will have to be moved out of the way."""
    return sum(
      max(0, self._taken[pool] - pool.free) * table.layers.block_bytes
      for table in self._slots.tables
      for pool in table.pools
    )


class Lane:
  """A block of slots with threads of its own. All but ``dispatch`` runs in the event loop.

  While a cycle is under way on the device, the next may be planned and dispatched: it goes on with
  the calls of which no more needs to be known, and takes in newcomers. A call that ends in a stop
  id draws nothing in the cycle ahead, by the device's own decision; one that ends in a stop string
  is taken back to its beginning.
  """

  def __init__(self, slots: SlotEngine, index: int, known: Sequence[PrefixCache]) -> None:
    self.slots = slots
    self.free = list(range(slots.slots))[::-1]
    self.jobs: dict[int, Job] = {}
    self.idle: dict[
      ContextState, int
    ] = {}  # contexts that keep a slot without a call, oldest first
    self.evictions: list[Read] = []
    self.leaving: list[ContextState] = []
    self.gone: list[int] = []
    self.interrupted = False  # by the end of an event loop, in the middle of a cycle
    self.under_way: collections.deque[Running] = collections.deque()  # not read yet, oldest first
    self.pace = Pace()
    self.cramped = False  # a call found no pages ahead: read what is under way first
    # Calls of the last cycle that decodes, by slot.
    self._calls: dict[int, tuple[tuple[int, ...], int]] = {}
    self.woken: list[ContextState] = []  # contexts whose calls the last cycle ended
    self.task: asyncio.Task[None] | None = None
    self.thread, self.waiter = (
      concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"engine-{name}{index}")
      for name in ("", "wait-")
    )
    self._known = known

  @property
  def running(self) -> Running | None:
    """The cycle that was dispatched last, where it was not read yet."""
    return self.under_way[-1] if self.under_way else None

  @property
  def may_go_ahead(self) -> bool:
    """Whether a cycle may be planned before what is under way is read.

    Some call of it must go on for certain. Pages are only taken from others once it is known what
    these hold.
    """
    rows = {} if self.running is None else self.running.cycle.decoding
    return not self.cramped and any(self._goes_on(slot, row) for slot, row in rows.items())

  def _goes_on(self, slot: int, row: Row) -> bool:
    """Whether a call draws more after a row, unless that ends in a stop."""
    alive = self.jobs.get(slot) is row.job
    return alive and not row.ends and self._room(row.job.context) > row.budget

  def plan(self, weights: Weights) -> Cycle | None:
    """The next cycle; None where there is nothing to do.

    What is under way may be unread: see ``may_go_ahead``.
    """
    before = None if self.running is None else self.running.cycle
    wanted = [block for pool in self.slots.pools for block in pool.wanted]
    cycle = Cycle(weights, wanted, self.evictions, self.leaving, self.gone)
    cycle.ahead = before is not None
    for pool in self.slots.pools:
      pool.wanted = []
    # Newcomers wait for what is about to be remembered: they may begin with it.
    remembering = any(len(c.evictions) > len(c.leaving) for c in (cycle, before) if c is not None)
    self.evictions, self.leaving, self.gone = [], [], []
    self.cramped = False
    supply = _Supply(self.slots, [*cycle.gone, *(item.slot for item in cycle.evictions)])
    queue = sorted(self.jobs.items(), key=lambda item: item[1].order)
    arrivals: dict[int, tuple[Snapshot | None, list[int]]] = {}
    ready: list[tuple[int, Job]] = []
    for i, (slot, job) in enumerate(queue):
      under_way = self._row(slot, job)
      if under_way is not None:
        if self._goes_on(slot, under_way):
          if supply.reach(slot, job.context.places + under_way.budget + 1):
            ready.append((slot, job))
          else:
            self.cramped = True
        continue
      if job.generation is None and job.read_planned:
        continue
      start = None
      if not job.placed:
        if remembering or job.context.parking:
          continue
        start = self._start_of(job.context, weights.versions[job.context.policy])
        if not self._reaches(start.base):
          continue
      if not self._make_way(cycle, supply, queue[i:], start):
        self.cramped = before is not None
        continue
      if start is not None:
        base = self._begin(job.context, start, cycle)
        arrivals.setdefault(id(base), (base, []))[1].append(slot)
        cycle.policies[slot] = job.context.policy
        job.context.placed()
        job.placed = True
      ready.append((slot, job))
    cycle.placements = list(arrivals.values())
    self._plan_chunk(cycle, supply, self._plan_rounds(cycle, supply, ready))
    while (moved := supply.moved_bytes) and not self.slots.store.room_for(moved):
      if not any(known.evict() for known in self._known):
        break
    return None if cycle.empty else cycle

  def _reaches(self, base: Snapshot | None) -> bool:
    """Whether a context can be placed here; other lanes are asked for what is missing."""
    missing = [] if base is None else [b for b in base.stored if not self.slots.reaches(b)]
    for block in missing:
      for pool in list(block.pages)[:1]:
        pool.wanted.append(block)
    return not missing

  def _make_way(
    self, cycle: Cycle, supply: _Supply, queue: list[tuple[int, Job]], start: _Start | None
  ) -> bool:
    """Takes pages for the next step of the first of ``queue``; others are parked if need be.

    First contexts without a call, the longest idle first; then those after it in the queue, the
    last first. So the first of the queue always goes on.
    """
    slot, job = queue[0]
    context = job.context
    tokens, base = context.held, None
    run = len(context.pending[0].ids) if context.extends_next else 0
    if start is not None:
      tokens, base = start.tokens, start.base
      if start.again or start.known:
        whole = context.origin if start.again else context.pending[0].ids
        assert whole is not None
        run = len(whole) - tokens
    copies = job.needs_read
    tokens += context.gap
    if run:
      tokens += min(run, self.slots.config.extend_buckets[-1])
    elif not copies or context.pending:  # kept tokens may wait to be drawn again before a copy
      tokens = min(tokens + 1, self.slots.programs.max_tokens)
    if supply.reach(slot, tokens, copies=copies, base=base):
      return True
    victims = [*self.idle, *(victim.context for _, victim in queue[:0:-1] if victim.placed)]
    for victim in victims:
      assert victim.home is not None
      other = victim.home[1]
      if victim.job is not None and self._is_unread(other, victim.job):
        continue
      if self.slots.way(other) == self.slots.way(slot) and supply.holds_any(other):
        self._park(cycle, supply, other, victim)
        if supply.reach(slot, tokens, copies=copies, base=base):
          return True
    return False

  def _is_unread(self, slot: int, job: Job) -> bool:
    """Whether the results under way tell what a call holds, or that it has ended."""
    return self._row(slot, job) is not None or (job.generation is None and job.read_planned)

  def _row(self, slot: int, job: Job) -> Row | None:
    """What the chunk under way draws for a call."""
    row = None if self.running is None else self.running.cycle.decoding.get(slot)
    return row if row is not None and row.job is job else None

  def _park(self, cycle: Cycle, supply: _Supply, slot: int, context: ContextState) -> None:
    """Gives a slot's pages to others; without a call, the slot as well."""
    if context.job is None:
      del self.idle[context]
      context.leave()
      self.free.append(slot)
    else:
      context.job.placed = False
      context.make_way()
    cycle.evictions.append(Read(slot, context.parked))
    cycle.leaving.append(context)
    cycle.parked += 1
    supply.give_up(slot)

  def _plan_chunk(self, cycle: Cycle, supply: _Supply, ready: list[tuple[int, Job]]) -> None:
    """A chunk for every call, or as much of it as there are pages for."""
    chunk_tokens = self.slots.config.chunk_tokens
    for slot, job in ready:
      under_way, generation = self._row(slot, job), self._decoding(job)
      drawn = 0 if under_way is None else under_way.budget
      if generation is None:
        continue
      known, places = job.context.held, job.context.places + drawn
      most = self._room(job.context) - drawn
      left = generation.request.max_tokens - generation.sampled - drawn
      room = min(most, chunk_tokens, left)
      if not supply.reach(slot, places + room, holding=known):
        room = min(room, supply.places(slot) - places)
      if room > 0 or most == 0:
        cycle.plan = cycle.plan or self.slots.idle_plan()
        generation.write(cycle.plan, slot, room, drawn)
        cycle.decoding[slot] = Row(job, generation, room)
    if cycle.decoding:
      calls = {slot: row.job.order for slot, row in cycle.decoding.items()}
      staying = len(calls.items() & self._calls.items())
      self.pace.note_rows(staying, len(calls) - staying)
      self._calls = calls

  def dispatch(self, cycle: Cycle) -> Running:
    """Starts a cycle; in the lane's thread."""
    slots, traces = self.slots, self.slots.programs.traces_here
    slots.device.first_dispatch = None
    slots.use(cycle.weights)
    slots.copy_out(cycle.wanted)
    read = [(item, slots.leave(item.slot)) for item in cycle.evictions]
    for slot in cycle.gone:
      slots.release(slot)
    for slot, policy in cycle.policies.items():
      slots.policies[slot] = policy
    for snapshot, targets in cycle.placements:
      slots.place(snapshot, targets)
    routed = []
    for part in cycle.rounds:
      routed += slots.extend(part.runs)
      read += [(item, slots.read(item.slot)) for item in part.reads]
    drawing = None if cycle.plan is None else slots.start(cycle.plan)
    if cycle.plan is not None:  # of some calls the grammar found no room
      for slot, row in cycle.decoding.items():
        cycle.decoding[slot] = dataclasses.replace(row, budget=int(cycle.plan.budget[slot]))
    start = slots.device.first_dispatch or time.perf_counter()
    slots.store.relieve_device()
    if slots.warm and slots.programs.traces_here != traces:
      raise EngineError(f"a program was compiled in the loop: {dict(slots.programs.traces)}.")
    return Running(cycle, read, routed, drawing, start)

  def finish(self, running: Running, results: Results) -> list[ContextState]:
    """Hands the results of a cycle to their contexts; returns those with non-finite log-probs."""
    cycle, chunk = running.cycle, results.chunk
    self.woken = []
    for routed, experts in zip(running.routed, results.experts, strict=True):
      cycle.running[routed.slot].experts.record(routed.start, experts)
    for item, snapshot in running.read:
      item.use(snapshot)
    if running.drawing is None or chunk is None:
      return []
    self.slots.end(running.drawing, chunk)
    broken = []
    for slot, row in cycle.decoding.items():
      if row.job.over:
        continue
      log_probs = chunk.behaviour_log_probs[slot, : int(chunk.counts[slot])]
      if np.isfinite(log_probs).all():
        self._read(slot, row, chunk, cycle.weights.versions[row.job.context.policy])
      else:
        broken.append(row.job.context)
    return broken

  def drop(self, slot: int) -> None:
    """Frees a slot, whatever it was doing."""
    self.jobs.pop(slot, None)
    self.free.append(slot)
    self.gone.append(slot)

  def insert(
    self, ids: np.ndarray, snapshot: Snapshot, context: ContextState, *, fresh: bool
  ) -> None:
    """Lets others begin where ``context`` was after ``ids``."""
    experts = context.experts.array()
    kept = None if experts is None else experts[: len(ids)]
    self._known[context.policy].insert(ids, Entry(snapshot, kept, fresh))

  def _start_of(self, context: ContextState, version: int) -> _Start:
    """Where a context starts from.

    A bare prefix of older weights is run again; a context that has sampled keeps its past.
    """
    base, origin = context.base, context.origin
    again = base is not None and origin is not None and base.version != version
    if base is not None and not again:
      return _Start(base)
    if not again and (context.held or not context.extends_next):
      return _Start(None)
    run, known = origin if again else context.pending[0].ids, self._known[context.policy]
    assert run is not None
    found = known.find(run) if known.version == version else None
    if found is None:
      return _Start(None, None, again)
    return _Start(self.slots.cut(found[1].snapshot, found[0]), found, again)

  def _begin(self, context: ContextState, start: _Start, cycle: Cycle) -> Snapshot | None:
    """Notes what is left for a context to take in from its start on."""
    if start.again:
      context.begin_again()
    if context.extends_next and not context.held and (start.again or context.base is None):
      context.first_run, context.last_boundary = context.pending[0].ids, 0
    if start.known is not None:
      tokens, entry = start.known
      assert start.base is not None
      whole = tokens % self.slots.config.extend_buckets[-1] == 0
      experts = None if entry.experts is None else entry.experts[:tokens]
      context.begin_known(start.base, experts, shares_more=entry.fresh and whole)
      cycle.reused += tokens
    return start.base

  def _plan_rounds(
    self, cycle: Cycle, supply: _Supply, ready: list[tuple[int, Job]]
  ) -> list[tuple[int, Job]]:
    """Pieces of what waits to be taken in, by priority, as far as the cycle's budget goes.

    Returns:
      Who of ``ready`` may decode.
    """
    config, budget = self.slots.config, self.slots.config.prefill_tokens
    queue, held_back = ready, set()
    while queue:
      part, left = Round(), []
      for slot, job in queue:
        context = job.context
        if context.extends_next:
          largest = config.extend_buckets[-1]
          size = min(len(context.pending[0].ids), largest)
          held = context.held
          if budget <= 0 or not supply.reach(slot, context.places + size, holding=held):
            continue
          run = context.first_run
          if run is not None and context.held >= len(run):
            context.first_run = None
          ids = context.next_piece(largest)
          budget -= next(b for b in config.extend_buckets if b >= len(ids))
          part.runs.append((slot, token_ids(ids)))
          cycle.running[slot] = context
          context.take(ids, cycle.weights.versions[context.policy])
          if not context.pending or context.extends_next:
            self._plan_boundary(part, supply, slot, context)
            left.append((slot, job))
        if not context.pending and job.needs_read:
          if supply.may_copy(slot):
            job.read_planned = True
            part.reads.append(Read(slot, self._job_reader(slot, job)))
          else:
            held_back.add(slot)
      if part.runs or part.reads:
        cycle.rounds.append(part)
      queue = [item for item in left if item[1].context.pending]
    return [item for item in ready if item[0] not in held_back]

  def _plan_boundary(self, part: Round, supply: _Supply, slot: int, context: ContextState) -> None:
    """Keeps a long prompt's beginning where others may share it."""
    run, held = context.first_run, context.held
    if run is None or held >= len(run) or self.slots.config.prefix_reuse == "none":
      return
    if held - context.last_boundary >= self.slots.config.snapshot_tokens and supply.may_copy(slot):
      context.last_boundary = held
      version = context.version

      def keep(snapshot: Snapshot) -> None:
        self.insert(run[:held], dataclasses.replace(snapshot, version=version), context, fresh=True)

      part.reads.append(Read(slot, keep))

  def _job_reader(self, slot: int, job: Job) -> Callable[[Snapshot], None]:
    """What happens to a snapshot that a job waits for, or needs before it samples."""
    context = job.context
    run, version = context.first_run, context.version

    def use(snapshot: Snapshot) -> None:
      if job.over:
        return
      snapshot = dataclasses.replace(snapshot, version=version)
      if job.generation is not None:
        job.turn_base = snapshot
        return
      if run is not None and len(run) == snapshot.length:
        self.insert(run, snapshot, context, fresh=True)
      self._end(slot, job, snapshot)

    return use

  def _decoding(self, job: Job) -> Generation | None:
    """What the slot decodes next: ids to be forced first, then the call itself."""
    if job.context.pending:
      if job.context.extends_next:
        return None  # the rest of a long prompt
      if job.forcing is None:
        ids = tuple(job.context.pending[0].ids.tolist())
        request = SampleRequest((0, 0), len(ids), forced_ids=ids)
        job.forcing = Generation(request, max_stop_ids=0)
      return job.forcing
    return job.generation

  def _read(self, slot: int, row: Row, chunk: Chunk, version: int) -> None:
    job, generation = row.job, row.generation
    context, count = job.context, int(chunk.counts[slot])
    experts = None if chunk.experts is None else chunk.experts[slot, :count]
    first = context.newest
    context.take_decoded(chunk.token_ids[slot, :count], experts, version)
    if not generation.read(chunk, slot, self._room(context), version, first):
      return
    if generation is job.forcing:
      context.pending.popleft()
      job.forcing = None
      return
    # A stop string may be found late: the cycle ahead is past it as well.
    draws_on = self._row(slot, job) is not None and not chunk.stopped[slot]
    self._end(slot, job, None)
    if generation.sampled > generation.kept or draws_on:
      # Recurrent state cannot step back: return to the start of the call and feed what was kept.
      assert job.turn_base is not None
      context.rewind(job.turn_base, generation.result().token_ids)
      del self.idle[context]
      self.free.append(slot)
      self.gone.append(slot)

  def _end(self, slot: int, job: Job, result: Snapshot | None) -> None:
    del self.jobs[slot]
    job.context.job = None
    self.idle[job.context] = next(_ticks)
    self.woken.append(job.context)
    job.future.set_result(result)

  def _room(self, context: ContextState) -> int:
    return self.slots.programs.max_tokens - context.places
