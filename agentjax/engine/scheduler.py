"""Continuous batching for asyncio: contexts that sample, wait for the world, grow and fork.

Host programs hold a ``Context`` each. Device work runs in one thread a lane, in cycles: as much of
what waits to be taken in as ``prefill_tokens`` allows, then one decode chunk for all slots. While a
thread works, the event loop runs tools and environments.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np

from agentjax.engine.config import EngineConfig
from agentjax.engine.grammar import check_fits
from agentjax.engine.prefix_cache import Entry, PrefixCache
from agentjax.engine.request import (
  Chunk,
  ContextLengthError,
  Decode,
  DecodePlan,
  EngineBusyError,
  EngineError,
  Generation,
  NonFiniteError,
  Sample,
  SampleRequest,
)
from agentjax.engine.slots import (
  Routed,
  SlotEngine,
  Weights,
  make_store,
  token_array,
  whole_on,
)
from agentjax.engine.store import Snapshot, Stored
from agentjax.models import ModelConfig, Params


@dataclasses.dataclass(frozen=True)
class _Run:
  """Ids a context still has to take in: by extension, or through the decode step."""

  kind: Literal["extend", "force"]
  ids: np.ndarray


@dataclasses.dataclass
class EngineStats:
  """Totals since the engine was made.

  Attributes:
    sampled_tokens: tokens decoded, forced and dropped ones included.
    extended_tokens: prompt and observation tokens run through the model.
    reused_tokens: those taken from a known prefix instead.
    decode_dispatches: chunks run.
    parked: contexts that had to leave their slot to others.
    store_overruns: of these, the ones for which the store was too small: no slot was at work, and
      to wait might have been for ever.
    drafted_tokens, accepted_tokens: tokens that speculation proposed, and those that were right.
    device_seconds: wall seconds the lanes' threads worked, summed over lanes.
  """

  sampled_tokens: int = 0
  extended_tokens: int = 0
  reused_tokens: int = 0
  decode_dispatches: int = 0
  parked: int = 0
  store_overruns: int = 0
  drafted_tokens: int = 0
  accepted_tokens: int = 0
  device_seconds: float = 0.0


class _Ledger:
  """One entry for every token a context holds, in the parts they came in."""

  def __init__(self, parts: Sequence[np.ndarray] = ()) -> None:
    self.parts = list(parts)
    self._length = sum(map(len, self.parts))

  def array(self) -> np.ndarray | None:
    """All of it; None where there is nothing."""
    return np.concatenate(self.parts) if self.parts else None

  def record(self, start: int, part: np.ndarray) -> None:
    """Notes the entries from ``start`` on; what stood there was taken back."""
    while self._length > start:
      last = self.parts.pop()
      self._length -= len(last)
      if self._length < start:
        self.parts.append(last[: start - self._length])
        self._length = start
    assert self._length == start, (self._length, start)
    if len(part):
      self.parts.append(part)
      self._length += len(part)


class Prefix:
  """A prompt that was run once and starts any number of contexts. ``release`` frees its memory."""

  def __init__(self, snapshot: Snapshot, ids: np.ndarray, experts: np.ndarray | None) -> None:
    self._snapshot: Snapshot | None = snapshot
    self._ids = ids
    self._experts = experts

  def __len__(self) -> int:
    return len(self._ids)

  def release(self) -> None:
    """Lets go of the device memory; contexts opened before live on."""
    self._snapshot = None


class Context:
  """One conversation with the policy. It needs a slot only while ``generate`` or ``fork`` runs.

  One call at a time. A call that is cancelled loses the context: only ``close`` is left.
  """

  def __init__(self, engine: Engine, priority: tuple[int, ...]) -> None:
    self._engine = engine
    self._priority = priority
    self._held = 0  # tokens in the slot, or in _base
    self._pending: collections.deque[_Run] = collections.deque()
    self._base: Snapshot | None = None  # what it is without a slot; None is empty
    self._origin: np.ndarray | None = None  # the ids _base was made of, where it is a bare prefix
    self._home: tuple[_Lane, int] | None = None  # its slot
    self._parked = False  # out of its slot to make room
    self._parking = False  # on its way out: _base is not there yet
    self._job: _Job | None = None
    self._lost: str | None = None
    self._version = -1  # of the weights that made what is held; -1 where there were several
    self._newest = -1  # of the weights that made what the next token is drawn from
    self._blocks: tuple[Stored, ...] = ()  # its first whole blocks, as far as they are stored
    self._first_run: np.ndarray | None = None  # while what is held began as part of this one run
    self._last_boundary = 0  # where in it the context was last kept
    self._ids = _Ledger()  # of the tokens held, where closed contexts are reused
    self._experts = _Ledger()  # of the tokens held, where they are recorded

  def __len__(self) -> int:
    """Tokens of the context, those not yet run through the model included."""
    return self._held + sum(len(run.ids) for run in self._pending)

  @property
  def room(self) -> int:
    """Tokens it can still take."""
    return self._engine.config.max_length - len(self)

  @property
  def experts(self) -> np.ndarray | None:
    """What the routers chose for the tokens run through the model so far, from the first on.

    Uint8 or uint16 [tokens, routers, choices] (see ``trajectory.experts``); None unless
    ``EngineConfig.record_experts``.
    """
    return self._experts.array()

  async def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
    """Appends ids. The next ``generate`` or ``fork`` runs them through the model with all others'.

    Raises:
      ContextLengthError: they do not fit; the context stays as it was.
    """
    self._check_usable()
    ids = token_array(token_ids, self._engine.model_config.vocab_size)
    if len(ids) > self.room:
      raise ContextLengthError(
        f"a context of {len(self)} tokens cannot take {len(ids)} more; allowed: "
        f"engine.max_length={self._engine.config.max_length} tokens in all."
      )
    self._pending.append(_Run("extend", ids))

  async def generate(self, request: SampleRequest) -> Sample:
    """Samples until a stop, ``max_tokens`` or a full context. The sample joins the context."""
    self._check_usable()
    if not len(self):
      raise ValueError("an empty context cannot sample: extend it by a prompt first.")
    request.sampling.validate()
    if request.grammar is not None:
      check_fits(request.grammar, self._engine.config, self._engine.model_config.vocab_size)
    generation = Generation(
      request,
      max_stop_ids=self._engine.config.max_stop_ids,
      decode=self._engine.decode,
    )
    await self._engine._run(_Job(self, generation))
    return generation.result()

  async def fork(self, count: int) -> list[Context]:
    """``count`` new contexts that go on from here, each on its own; this one stays usable."""
    self._check_usable()
    base, origin = self._base, self._origin
    if self._pending or self._home is not None or self._parking:
      base, origin = await self._engine._run(_Job(self, None)), None
    forks = [Context(self._engine, self._priority) for _ in range(count)]
    for fork in forks:
      fork._base, fork._origin, fork._held = base, origin, self._held
      fork._version, fork._blocks = self._version, self._blocks
      fork._newest = self._newest
      fork._ids, fork._experts = _Ledger(self._ids.parts), _Ledger(self._experts.parts)
    return forks

  def close(self) -> None:
    """Frees the slot; may be called twice. A call under way ends in EngineError."""
    if self._engine.config.prefix_reuse == "turns" and self._job is None and self._lost is None:
      self._engine._remember(self)
    self._engine._drop(self, "it was closed")

  def _begin_at(self, base: Snapshot | None) -> None:
    """Takes over what a snapshot says."""
    self._held = 0 if base is None else base.length
    self._version = self._newest = -1 if base is None else base.version
    self._keep_blocks(() if base is None else base.blocks)

  def _keep_blocks(self, blocks: Sequence[Stored]) -> None:
    """Notes stored blocks; one that is not full will change."""
    self._blocks = tuple(blocks[: self._held // self._engine.block_tokens])

  def _take(self, tokens: int, version: int) -> None:
    """Counts tokens that the model took in."""
    self._version = version if self._held == 0 or self._version == version else -1
    self._newest = version
    self._held += tokens

  def _check_usable(self) -> None:
    if self._lost is not None:
      raise EngineError(f"the context cannot be used: {self._lost}.")
    if self._job is not None:
      raise EngineError("the context is busy: await its call before the next.")


class _Job:
  """A call of a context: a generation, or (None) a snapshot of what it is."""

  def __init__(self, context: Context, generation: Generation | None) -> None:
    self.context = context
    self.generation = generation
    self.forcing: Generation | None = None  # sampled tokens on their way back in
    self.turn_base: Snapshot | None = None  # the context before the call
    self.placed = context._home is not None
    self.order: tuple[tuple[int, ...], int] = ((), 0)  # priority, then arrival
    self.future: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()

  @property
  def over(self) -> bool:
    """Ended, failed or dropped."""
    return self.future.done()

  @property
  def needs_turn_base(self) -> bool:
    """A stop string may cut the call behind the device's back: remember where it began."""
    generation = self.generation
    return (
      generation is not None and bool(generation.request.stop_strings) and self.turn_base is None
    )


@dataclasses.dataclass
class _Read:
  """A context to be copied out of its slot, and what is then done with it in the event loop."""

  slot: int
  known: tuple[Stored, ...]
  use: Callable[[Snapshot], None]


@dataclasses.dataclass
class _Round:
  """At most one piece for every slot, then copies of what the slots hold."""

  runs: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)
  reads: list[_Read] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Cycle:
  """Device work of one lane, in this order; plain data for its thread."""

  weights: Weights
  evictions: list[_Read]
  leaving: list[Context]  # whose evictions these are
  placements: list[tuple[Snapshot | None, list[int]]] = dataclasses.field(default_factory=list)
  rounds: list[_Round] = dataclasses.field(default_factory=list)
  running: dict[int, Context] = dataclasses.field(default_factory=dict)  # by slot, of the runs
  decoding: list[tuple[int, _Job]] = dataclasses.field(default_factory=list)
  plan: DecodePlan | None = None
  reused: int = 0  # tokens taken from known prefixes


@dataclasses.dataclass
class _Outcome:
  """What a cycle gave."""

  read: list[tuple[_Read, Snapshot]]
  routed: list[Routed]
  chunk: Chunk | None
  seconds: float


class _Lane:
  """A block of slots with a thread of its own. All but ``execute`` runs in the event loop."""

  def __init__(self, slots: SlotEngine, index: int, known: PrefixCache) -> None:
    self.slots = slots
    self.free = list(range(slots.slots))[::-1]
    self.jobs: dict[int, _Job] = {}
    self.idle: dict[Context, int] = {}  # contexts that keep a slot without a call, oldest first
    self.evictions: list[_Read] = []
    self.leaving: list[Context] = []
    self.woken: list[Context] = []  # contexts whose calls the last cycle ended
    self.task: asyncio.Task[None] | None = None
    self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"engine-{index}")
    self._known = known

  def plan(self, weights: Weights) -> _Cycle | None:
    """The next cycle; None where there is nothing to do."""
    cycle = _Cycle(weights, self.evictions, self.leaving)
    self.evictions, self.leaving = [], []
    if not self.jobs and not cycle.evictions:
      return None
    arrivals: dict[int, tuple[Snapshot | None, list[int]]] = {}
    # Newcomers wait for what is about to be remembered: they may begin with it.
    remembering = len(cycle.evictions) > len(cycle.leaving)
    for slot, job in self.jobs.items():
      if not job.placed and not remembering:
        base = self._base(job.context, cycle)
        arrivals.setdefault(id(base), (base, []))[1].append(slot)
        job.context._base, job.context._origin, job.placed = None, None, True
    cycle.placements = list(arrivals.values())
    self._plan_rounds(cycle)
    for slot, job in self.jobs.items():
      generation = self._decoding(job) if job.placed else None
      if generation is not None:
        cycle.plan = cycle.plan or self.slots.idle_plan()
        generation.write(cycle.plan, slot, self._room(job.context))
        cycle.decoding.append((slot, job))
    return cycle

  def execute(self, cycle: _Cycle) -> _Outcome:
    """Runs a cycle; in the lane's thread."""
    start = time.perf_counter()
    slots, traces = self.slots, self.slots.programs.traces_here
    slots.use(cycle.weights)
    read = [(item, slots.read(item.slot, item.known)) for item in cycle.evictions]
    for snapshot, targets in cycle.placements:
      slots.place(snapshot, targets)
    routed = []
    for part in cycle.rounds:
      routed += slots.extend(part.runs)
      read += [(item, slots.read(item.slot, item.known)) for item in part.reads]
    chunk = None if cycle.plan is None else slots.decode(cycle.plan)
    slots.store.relieve_device()
    if slots.warm and slots.programs.traces_here != traces:
      raise EngineError(f"a program was compiled in the loop: {dict(slots.programs.traces)}.")
    return _Outcome(read, routed, chunk, time.perf_counter() - start)

  def finish(self, cycle: _Cycle, outcome: _Outcome) -> None:
    """Hands the results of a cycle to their contexts."""
    self.woken = []
    for routed in outcome.routed:
      cycle.running[routed.slot]._experts.record(routed.start, routed.experts())
    for item, snapshot in outcome.read:
      item.use(snapshot)
    for slot, job in cycle.decoding:
      if not job.over and outcome.chunk is not None:
        self._read(slot, job, outcome.chunk, cycle.weights.version)

  def drop(self, slot: int) -> None:
    """Frees a slot, whatever it was doing."""
    self.jobs.pop(slot, None)
    self.free.append(slot)

  def insert(self, ids: np.ndarray, snapshot: Snapshot, context: Context, *, fresh: bool) -> None:
    """Lets others begin where ``context`` was after ``ids``."""
    experts = context._experts.array()
    kept = None if experts is None else experts[: len(ids)]
    self._known.insert(ids, Entry(snapshot, kept, fresh))

  def _base(self, context: Context, cycle: _Cycle) -> Snapshot | None:
    """Where a context starts from; it has noted what is then left for it to take in.

    A bare prefix of older weights is run again; a context that has sampled keeps its past.
    """
    base, origin, version = context._base, context._origin, cycle.weights.version
    if base is not None and (origin is None or base.version == version):
      return base
    if base is not None and origin is not None:
      context._pending.appendleft(_Run("extend", origin))
      context._begin_at(None)
    first = context._pending[0]
    if context._held or first.kind != "extend":
      return None
    context._first_run, context._last_boundary = first.ids, 0
    found = self._known.find(first.ids) if self._known.version == version else None
    if found is None:
      return None
    tokens, entry = found
    base = self.slots.cut(entry.snapshot, tokens)
    context._pending.popleft()
    if tokens < len(first.ids):
      context._pending.appendleft(_Run("extend", first.ids[tokens:]))
    if not entry.fresh or tokens % self.slots.config.extend_buckets[-1]:
      context._first_run = None
    context._begin_at(base)
    context._last_boundary = tokens
    context._ids = _Ledger([first.ids[:tokens]])
    context._experts = _Ledger([] if entry.experts is None else [entry.experts[:tokens]])
    cycle.reused += tokens
    return base

  def _plan_rounds(self, cycle: _Cycle) -> None:
    """Pieces of what waits to be taken in, by priority, as far as the cycle's budget goes."""
    config, budget = self.slots.config, self.slots.config.prefill_tokens
    placed = [item for item in self.jobs.items() if item[1].placed]
    queue = sorted(placed, key=lambda item: item[1].order)
    while queue:
      part, left = _Round(), []
      for slot, job in queue:
        context = job.context
        if context._pending and context._pending[0].kind == "extend":
          if budget <= 0:
            continue
          run = context._first_run
          if run is not None and context._held >= len(run):
            context._first_run = None
          ids = self._next_piece(context)
          budget -= next(b for b in config.extend_buckets if b >= len(ids))
          part.runs.append((slot, ids))
          cycle.running[slot] = context
          context._ids.record(context._held, ids)
          context._take(len(ids), cycle.weights.version)
          if not context._pending or context._pending[0].kind == "extend":
            self._plan_boundary(part, slot, context)
            left.append((slot, job))
        if not context._pending and (job.generation is None or job.needs_turn_base):
          part.reads.append(_Read(slot, context._blocks, self._job_reader(slot, job)))
      if part.runs or part.reads:
        cycle.rounds.append(part)
      queue = [item for item in left if item[1].context._pending]

  def _next_piece(self, context: Context) -> np.ndarray:
    """The next ids in one extension: a run is cut into pieces of the largest bucket."""
    run = context._pending.popleft()
    largest = self.slots.config.extend_buckets[-1]
    if len(run.ids) > largest:
      context._pending.appendleft(_Run("extend", run.ids[largest:]))
    return run.ids[:largest]

  def _plan_boundary(self, part: _Round, slot: int, context: Context) -> None:
    """Keeps a long prompt's beginning where others may share it."""
    run, held = context._first_run, context._held
    if run is None or held >= len(run) or self.slots.config.prefix_reuse == "none":
      return
    if held - context._last_boundary >= self.slots.config.snapshot_tokens:
      context._last_boundary = held
      version = context._version

      def keep(snapshot: Snapshot) -> None:
        context._keep_blocks(snapshot.blocks[: held // self.slots.programs.block_tokens])
        self.insert(run[:held], dataclasses.replace(snapshot, version=version), context, fresh=True)

      part.reads.append(_Read(slot, context._blocks, keep))

  def _job_reader(self, slot: int, job: _Job) -> Callable[[Snapshot], None]:
    """What happens to a snapshot that a job waits for, or needs before it samples."""
    context = job.context
    run, version = context._first_run, context._version

    def use(snapshot: Snapshot) -> None:
      if job.over:
        return
      snapshot = dataclasses.replace(snapshot, version=version)
      context._keep_blocks(snapshot.blocks)
      if job.generation is not None:
        job.turn_base = snapshot
        return
      if run is not None and len(run) == snapshot.length:
        self.insert(run, snapshot, context, fresh=True)
      self._end(slot, job, snapshot)

    return use

  def _decoding(self, job: _Job) -> Generation | None:
    """What the slot decodes next: ids to be forced first, then the call itself."""
    if job.context._pending:
      if job.context._pending[0].kind == "extend":
        return None  # the rest of a long prompt
      if job.forcing is None:
        ids = tuple(job.context._pending[0].ids.tolist())
        request = SampleRequest((0, 0), len(ids), forced_ids=ids)
        job.forcing = Generation(request, max_stop_ids=0)
      return job.forcing
    return job.generation

  def _read(self, slot: int, job: _Job, chunk: Chunk, version: int) -> None:
    context, count = job.context, int(chunk.counts[slot])
    if not np.isfinite(chunk.behaviour_log_probs[slot, :count]).all():
      context._engine._drop(context, "its log-probs are not finite", NonFiniteError)
      return
    if chunk.experts is not None:
      context._experts.record(context._held, chunk.experts[slot, :count])
    context._ids.record(context._held, chunk.token_ids[slot, :count])
    context._first_run = None
    first = context._newest
    context._take(count, version)
    room = self._room(context)
    if job.forcing is not None:
      if job.forcing.read(chunk, slot, room, version, first):
        context._pending.popleft()
        job.forcing = None
      return
    generation = job.generation
    assert generation is not None
    if not generation.read(chunk, slot, room, version, first):
      return
    self._end(slot, job, None)
    dropped = generation.sampled - generation.kept
    if dropped:
      # Recurrent state cannot step back: return to the start of the call and feed what was kept.
      assert job.turn_base is not None
      context._base = job.turn_base
      context._begin_at(job.turn_base)
      context._pending.append(_Run("force", generation.result().token_ids))
      del self.idle[context]
      context._home = None
      self.free.append(slot)

  def _end(self, slot: int, job: _Job, result: Snapshot | None) -> None:
    del self.jobs[slot]
    job.context._job = None
    self.idle[job.context] = next(_ticks)
    self.woken.append(job.context)
    job.future.set_result(result)

  def _room(self, context: Context) -> int:
    return self.slots.config.max_length - context._held


_ticks = itertools.count()


class Engine:
  """Samples for many asyncio programs at once over a fixed number of slots.

  Tokens depend on the weights, the context's ids and ``SampleRequest.key_data`` alone: which slot,
  which neighbours, which order and how long a program waited change no bit. Slots are given by
  priority, then by arrival; a context without a call under way may be parked to make room.

  One event loop at a time may use it; ``asyncio.run`` may be called again and again. An error in
  device work ends every call under way and all later ones in EngineError.

  Args:
    model_config: of the parameters to be published.
    config: sizes.
    decode: ids to text, for stop strings.
    vocab_limit: ids from here on are never drawn; None allows all of the model's vocabulary.
    devices: lane i lives on device i modulo their number; None is all local devices.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    decode: Decode | None = None,
    vocab_limit: int | None = None,
    devices: Sequence[jax.Device] | None = None,
  ) -> None:
    config.validate("engine")
    self.decode = decode
    self.stats = EngineStats()
    places = list(devices or jax.local_devices())
    self._store = make_store(config)
    slots = [
      SlotEngine(
        model_config,
        config,
        device=places[i % len(places)],
        vocab_limit=vocab_limit,
        decode=decode,
        store=self._store,
      )
      for i in range(config.lanes)
    ]
    self._known = PrefixCache(
      config.extend_buckets[-1],
      any_history=config.prefix_reuse == "turns",
      attention_only=slots[0].programs.attention_only,
    )
    self._lanes = [_Lane(engine, i, self._known) for i, engine in enumerate(slots)]
    self.model_config = self._lanes[0].slots.model_config
    self.config = self._lanes[0].slots.config
    self._weights: dict[jax.Device, Weights] = {}
    self._known_of = self._weights  # what the known prefixes were made with
    self._waiting: list[tuple[tuple[int, ...], int, _Job]] = []
    self._submitted = 0
    self._error: Exception | None = None

  @property
  def block_tokens(self) -> int:
    """Tokens of the blocks in which keys and values are stored."""
    return self._lanes[0].slots.programs.block_tokens

  @property
  def stored_bytes(self) -> tuple[int, int]:
    """Bytes stored outside the slots, on the device and on the host."""
    return self._store.on_device, self._store.on_host

  @property
  def waiting(self) -> int:
    """Calls that wait for a slot: the pressure on the engine."""
    return sum(not job.over for _, _, job in self._waiting)

  @property
  def version(self) -> int:
    """Version of the weights in use; -1 before the first ``publish``."""
    return next((w.version for w in self._weights.values()), -1)

  def publish(self, params: Params, version: int) -> None:
    """Takes a copy of new training parameters, from the next dispatch on.

    They may be sharded; where they span processes, all processes must call this together.
    Every token carries the version it was sampled with. A prefix of other weights is run again
    where it is opened; a context that has sampled keeps what it has in its cache.

    Any thread may call this while programs sample, one call at a time: a cycle takes the weights
    once, when it is planned, and its tokens carry their version.
    """
    engines = {lane.slots.device: lane.slots for lane in self._lanes}
    copies = whole_on(list(engines), params)
    # Each copy goes when it is prepared.
    weights = {d: slots.prepare(copies.pop(d), version) for d, slots in engines.items()}
    if not self._weights:  # nothing runs yet
      for lane in self._lanes:
        lane.slots.use(weights[lane.slots.device])
        if self.config.warmup:
          lane.slots.warmup()
    self._weights = weights

  async def prefill(
    self, token_ids: Sequence[int] | np.ndarray, *, priority: tuple[int, ...] = ()
  ) -> Prefix:
    """Runs a prompt once, for any number of contexts.

    Raises:
      ContextLengthError: it is longer than ``max_length``.
    """
    context = Context(self, priority)
    try:
      await context.extend(token_ids)
      ids = context._pending[0].ids
      snapshot = await self._run(_Job(context, None))
    finally:
      self._drop(context, "it was a prefill")
    assert snapshot is not None
    return Prefix(snapshot, ids, context._experts.array())

  async def open(self, prefix: Prefix, *, priority: tuple[int, ...] = ()) -> Context:
    """A context that begins with ``prefix``. Lower priority tuples get slots first."""
    if prefix._snapshot is None:
      raise EngineError("the prefix was released.")
    context = Context(self, priority)
    context._base, context._origin = prefix._snapshot, prefix._ids
    context._begin_at(prefix._snapshot)
    context._ids = _Ledger([prefix._ids])
    context._experts = _Ledger([] if prefix._experts is None else [prefix._experts])
    return context

  async def open_ids(
    self, token_ids: Sequence[int] | np.ndarray, *, priority: tuple[int, ...] = ()
  ) -> Context:
    """A context that begins with ``token_ids``; they run with its first ``generate``."""
    context = Context(self, priority)
    await context.extend(token_ids)
    return context

  def executables(self) -> tuple[str, ...]:
    """Names of all compiled programs."""
    return self._lanes[0].slots.executables()

  def close(self) -> None:
    """Ends the threads. Calls under way fail."""
    self._fail(EngineError("the engine was closed"))
    for lane in self._lanes:
      lane.thread.shutdown(wait=True)
      lane.evictions.clear()
    self._known.clear(-1)

  async def _run(self, job: _Job) -> Snapshot | None:
    """Waits until a job is done; a cancelled wait gives the slot back at once."""
    context = job.context
    if self._error is not None:
      raise EngineError(f"the engine stopped: {self._error}") from self._error
    if not self._weights:
      raise EngineError("no weights yet: call publish(params, version) first.")
    limit = self.config.max_waiting
    if limit and context._home is None and self.waiting >= limit:
      raise EngineBusyError(
        f"{self.waiting} calls wait for a slot; allowed: engine.max_waiting={limit}. Try again "
        f"when others have ended, or raise engine.max_waiting or engine.slots."
      )
    context._job = job
    self._submitted += 1
    job.order = (context._priority, self._submitted)
    if context._home is None:
      heapq.heappush(self._waiting, (*job.order, job))
      self._admit()
    else:
      lane, slot = context._home
      del lane.idle[context]
      self._start(lane, slot, job)
    try:
      return await job.future
    except asyncio.CancelledError:
      self._drop(context, "its call was cancelled")
      raise

  def _start(self, lane: _Lane, slot: int, job: _Job) -> None:
    lane.jobs[slot] = job
    self._wake(lane)

  def _wake(self, lane: _Lane) -> None:
    loop = asyncio.get_running_loop()
    if lane.task is None or lane.task.get_loop() is not loop:
      lane.task = loop.create_task(self._drive(lane))

  def _admit(self) -> None:
    """Gives slots to waiting jobs, in order."""
    not_ready = []
    while self._waiting:
      entry = self._waiting[0]
      job = entry[2]
      if job.over or job.context._parking:
        heapq.heappop(self._waiting)
        if not job.over:
          not_ready.append(entry)
        continue
      home = self._find_slot()
      if home is None:
        break
      heapq.heappop(self._waiting)
      job.context._home = home
      self._start(*home, job)
    for entry in not_ready:
      heapq.heappush(self._waiting, entry)

  def _find_slot(self) -> tuple[_Lane, int] | None:
    """A slot of the emptiest lane, or that of the longest idle context."""
    lane = max(self._lanes, key=lambda lane: len(lane.free))
    if lane.free:
      return lane, lane.free.pop()
    idle = [next(iter(lane.idle.items())) for lane in self._lanes if lane.idle]
    if not idle:
      return None
    context = min(idle, key=lambda item: item[1])[0]
    if not self._make_room(context):
      if any(lane.jobs for lane in self._lanes):
        return None
      # The device would stand still, perhaps for ever: those who wait may be waited for.
      self.stats.store_overruns += 1
    assert context._home is not None
    lane, slot = context._home
    del lane.idle[context]
    context._home, context._parking = None, True
    self.stats.parked += 1

    def park(snapshot: Snapshot) -> None:
      context._parking = False
      if context._lost is None:
        context._base = dataclasses.replace(snapshot, version=context._version)
        context._keep_blocks(snapshot.blocks)

    lane.evictions.append(_Read(slot, context._blocks, park))
    lane.leaving.append(context)
    return lane, slot

  def _make_room(self, context: Context) -> bool:
    """Whether a context can be stored, once known prefixes have made way."""
    programs = self._lanes[0].slots.programs
    blocks = -(-context._held // programs.block_tokens) - len(context._blocks)
    needed = programs.state_bytes + blocks * programs.block_bytes
    while not self._store.room_for(needed):
      if not self._known.evict():
        return False
    return True

  def _drop(self, context: Context, why: str, error: type[EngineError] = EngineError) -> None:
    """Ends a context: its slot is free at once, its call under way fails."""
    if context._lost is not None:
      return
    context._lost = why
    context._base, context._blocks = None, ()
    context._pending.clear()
    if context._home is not None:
      lane, slot = context._home
      lane.idle.pop(context, None)
      lane.drop(slot)
      context._home = None
    job, context._job = context._job, None
    if job is not None and not job.over:
      job.future.set_exception(error(f"the context cannot be used: {why}."))
    self._admit()

  def _remember(self, context: Context) -> None:
    """Keeps what a closing context holds in its slot for those that begin alike."""
    ids = context._ids.array()
    if context._home is None or context._version != self.version or ids is None:
      return
    if len(ids) != context._held or not self._make_room(context):
      return
    (lane, slot), version = context._home, context._version
    lane.evictions.append(
      _Read(
        slot,
        context._blocks,
        lambda snapshot: lane.insert(
          ids, dataclasses.replace(snapshot, version=version), context, fresh=False
        ),
      )
    )
    self._wake(lane)

  async def _drive(self, lane: _Lane) -> None:
    """Runs cycles while the lane has work."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    cycle: _Cycle | None = None
    outcome: _Outcome | None = None
    try:
      while True:
        await self._settle(lane)
        every = self._weights  # another thread may publish new ones
        weights = every[lane.slots.device]
        if self._known_of is not every:
          self._known.clear(weights.version)
          self._known_of = every
        cycle = lane.plan(weights)
        if cycle is None:
          return
        outcome = await loop.run_in_executor(lane.thread, lane.execute, cycle)
        lane.finish(cycle, outcome)
        self._account(cycle, outcome)
        cycle = outcome = None  # what was read belongs to others now
        self._admit()
    except asyncio.CancelledError:
      # The loop is shutting down; the thread may still be at work on these slots.
      for context in [job.context for job in lane.jobs.values()]:
        self._drop(context, "the event loop ended")
      for context in cycle.leaving if cycle else ():
        self._drop(context, "the event loop ended")
      raise
    except Exception as error:
      self._fail(error)
    finally:
      if lane.task is task:
        lane.task = None

  async def _settle(self, lane: _Lane) -> None:
    """Lets programs that were woken come back with their next call before the slots run on."""
    quiet = 0
    for _ in range(self.config.host_turns):
      before = self._submitted
      await asyncio.sleep(0)
      lane.woken = [c for c in lane.woken if c._job is None and c._lost is None]
      quiet = quiet + 1 if self._submitted == before else 0
      if quiet >= 3 and not lane.woken:
        return

  def _account(self, cycle: _Cycle, outcome: _Outcome) -> None:
    stats = self.stats
    stats.device_seconds += outcome.seconds
    stats.extended_tokens += sum(len(ids) for part in cycle.rounds for _, ids in part.runs)
    stats.reused_tokens += cycle.reused
    if outcome.chunk is not None:
      stats.decode_dispatches += 1
      stats.sampled_tokens += int(outcome.chunk.counts.sum())
      if outcome.chunk.drafted is not None and outcome.chunk.accepted is not None:
        stats.drafted_tokens += int(outcome.chunk.drafted.sum())
        stats.accepted_tokens += int(outcome.chunk.accepted.sum())

  def _fail(self, error: Exception) -> None:
    """Ends everything under way with ``error``."""
    self._error = self._error or error
    jobs = [entry[2] for entry in self._waiting]
    jobs += [job for lane in self._lanes for job in lane.jobs.values()]
    self._waiting = []
    for job in jobs:
      if not job.over:
        failure = EngineError(f"the engine stopped: {error}")
        failure.__cause__ = error
        job.future.set_exception(failure)
