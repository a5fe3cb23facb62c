"""Continuous batching for asyncio: contexts that sample, wait for the world, grow and fork.

Host programs hold a ``Context`` each. Device work runs in one thread a lane, in cycles: everything
that waits is extended, then all slots decode one chunk. While a thread works, the event loop runs
tools and environments.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import heapq
import itertools
import time
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from agentjax.engine.config import EngineConfig
from agentjax.engine.programs import Snapshot
from agentjax.engine.request import (
  Chunk,
  ContextLengthError,
  Decode,
  DecodePlan,
  EngineError,
  Generation,
  Sample,
  SampleRequest,
)
from agentjax.engine.slots import Routed, SlotEngine, Weights, token_array
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
    extended_tokens: prompt and observation tokens taken in.
    decode_dispatches: chunks run.
    parked: contexts that had to leave their slot to others.
    device_seconds: wall seconds the lanes' threads worked, summed over lanes.
  """

  sampled_tokens: int = 0
  extended_tokens: int = 0
  decode_dispatches: int = 0
  parked: int = 0
  device_seconds: float = 0.0


class Prefix:
  """A prompt that was run once and starts any number of contexts. ``release`` frees its memory."""

  def __init__(self, snapshot: Snapshot, ids: np.ndarray, experts: list[np.ndarray]) -> None:
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
    self._experts: list[np.ndarray] = []  # of the tokens held, where they are recorded

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
    return np.concatenate(self._experts) if self._experts else None

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
      fork._experts = list(self._experts)
    return forks

  def close(self) -> None:
    """Frees the slot; may be called twice. A call under way ends in EngineError."""
    self._engine._drop(self, "it was closed")

  def _record(self, start: int, experts: np.ndarray) -> None:
    """Notes the choices for the tokens from ``start`` on; what stood there was taken back."""
    kept, end = [], 0
    for part in self._experts:
      kept.append(part[: max(start - end, 0)])
      end += len(kept[-1])
    assert end == start, (end, start)
    self._experts = [part for part in (*kept, experts) if len(part)]

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
class _Cycle:
  """Device work of one lane, in this order; plain data for its thread."""

  weights: Weights
  evictions: list[tuple[Context, int]] = dataclasses.field(default_factory=list)
  placements: list[tuple[Snapshot | None, list[int]]] = dataclasses.field(default_factory=list)
  runs: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)
  running: dict[int, Context] = dataclasses.field(default_factory=dict)  # by slot, of the runs
  reads: list[tuple[int, _Job]] = dataclasses.field(default_factory=list)
  decoding: list[tuple[int, _Job]] = dataclasses.field(default_factory=list)
  plan: DecodePlan | None = None


@dataclasses.dataclass
class _Outcome:
  """What a cycle gave."""

  evicted: list[Snapshot]
  reads: list[Snapshot]
  routed: list[Routed]
  chunk: Chunk | None
  seconds: float


class _Lane:
  """A block of slots with a thread of its own. All but ``execute`` runs in the event loop."""

  def __init__(self, slots: SlotEngine, index: int) -> None:
    self.slots = slots
    self.free = list(range(slots.slots))[::-1]
    self.jobs: dict[int, _Job] = {}
    self.idle: dict[Context, int] = {}  # contexts that keep a slot without a call, oldest first
    self.evictions: list[tuple[Context, int]] = []
    self.woken: list[Context] = []  # contexts whose calls the last cycle ended
    self.task: asyncio.Task[None] | None = None
    self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"engine-{index}")

  def plan(self, weights: Weights) -> _Cycle | None:
    """The next cycle; None where there is nothing to do."""
    cycle = _Cycle(weights, evictions=self.evictions)
    self.evictions = []
    arrivals: dict[int, tuple[Snapshot | None, list[int]]] = {}
    for slot, job in self.jobs.items():
      context = job.context
      if not job.placed:
        base = self._fresh_base(context, weights.version)
        arrivals.setdefault(id(base), (base, []))[1].append(slot)
        context._base, context._origin, job.placed = None, None, True
      pending = context._pending
      while pending and pending[0].kind == "extend":
        ids = pending.popleft().ids
        cycle.runs.append((slot, ids))
        cycle.running[slot] = context
        context._held += len(ids)
      if not pending and (job.generation is None or job.needs_turn_base):
        cycle.reads.append((slot, job))
      generation = self._decoding(job)
      if generation is not None:
        cycle.plan = cycle.plan or self.slots.idle_plan()
        generation.write(cycle.plan, slot, self._room(context))
        cycle.decoding.append((slot, job))
    cycle.placements = list(arrivals.values())
    return cycle if self.jobs or cycle.evictions else None

  def execute(self, cycle: _Cycle) -> _Outcome:
    """Runs a cycle; in the lane's thread."""
    start = time.perf_counter()
    slots = self.slots
    slots.use(cycle.weights)
    evicted = [slots.read(slot) for _, slot in cycle.evictions]
    for snapshot, targets in cycle.placements:
      slots.place(snapshot, targets)
    routed = slots.extend(cycle.runs)
    reads = [slots.read(slot) for slot, _ in cycle.reads]
    chunk = None if cycle.plan is None else slots.decode(cycle.plan)
    return _Outcome(evicted, reads, routed, chunk, time.perf_counter() - start)

  def finish(self, cycle: _Cycle, outcome: _Outcome) -> None:
    """Hands the results of a cycle to their contexts."""
    self.woken = []
    for (context, _), snapshot in zip(cycle.evictions, outcome.evicted, strict=True):
      context._parking = False
      if context._lost is None:
        context._base = snapshot
    for routed in outcome.routed:
      cycle.running[routed.slot]._record(routed.start, routed.experts())
    for (slot, job), snapshot in zip(cycle.reads, outcome.reads, strict=True):
      if job.over:
        continue
      if job.generation is None:
        self._end(slot, job, snapshot)
      else:
        job.turn_base = snapshot
    for slot, job in cycle.decoding:
      if not job.over and outcome.chunk is not None:
        self._read(slot, job, outcome.chunk, cycle.weights.version)

  def drop(self, slot: int) -> None:
    """Frees a slot, whatever it was doing."""
    self.jobs.pop(slot, None)
    self.free.append(slot)

  def _fresh_base(self, context: Context, version: int) -> Snapshot | None:
    """A bare prefix of older weights is run again; a context that has sampled keeps its past."""
    base, origin = context._base, context._origin
    if base is None or origin is None or base.version == version:
      return base
    context._pending.appendleft(_Run("extend", origin))
    context._held -= len(origin)
    return None

  def _decoding(self, job: _Job) -> Generation | None:
    """What the slot decodes next: ids to be forced first, then the call itself."""
    if job.context._pending:
      if job.forcing is None:
        ids = tuple(job.context._pending[0].ids.tolist())
        request = SampleRequest((0, 0), len(ids), forced_ids=ids)
        job.forcing = Generation(request, max_stop_ids=0)
      return job.forcing
    return job.generation

  def _read(self, slot: int, job: _Job, chunk: Chunk, version: int) -> None:
    context = job.context
    if chunk.experts is not None:
      context._record(context._held, chunk.experts[slot, : int(chunk.counts[slot])])
    context._held += int(chunk.counts[slot])
    room = self.slots.config.max_length - context._held
    if job.forcing is not None:
      if job.forcing.read(chunk, slot, room, version):
        context._pending.popleft()
        job.forcing = None
      return
    generation = job.generation
    assert generation is not None
    if not generation.read(chunk, slot, room, version):
      return
    self._end(slot, job, None)
    dropped = generation.sampled - generation.kept
    if dropped:
      # Recurrent state cannot step back: return to the start of the call and feed what was kept.
      assert job.turn_base is not None
      context._base, context._held = job.turn_base, job.turn_base.length
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
    self._lanes = [
      _Lane(
        SlotEngine(
          model_config,
          config,
          device=places[i % len(places)],
          vocab_limit=vocab_limit,
          decode=decode,
        ),
        i,
      )
      for i in range(config.lanes)
    ]
    self.model_config = self._lanes[0].slots.model_config
    self.config = self._lanes[0].slots.config
    self._weights: dict[jax.Device, Weights] = {}
    self._waiting: list[tuple[tuple[int, ...], int, _Job]] = []
    self._submitted = 0
    self._parked = 0
    self._error: Exception | None = None

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
    weights = {d: slots.prepare(params, version) for d, slots in engines.items()}
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
      context.close()
    assert snapshot is not None
    return Prefix(snapshot, ids, context._experts)

  async def open(self, prefix: Prefix, *, priority: tuple[int, ...] = ()) -> Context:
    """A context that begins with ``prefix``. Lower priority tuples get slots first."""
    if prefix._snapshot is None:
      raise EngineError("the prefix was released.")
    context = Context(self, priority)
    context._base, context._origin = prefix._snapshot, prefix._ids
    context._held = len(prefix)
    context._experts = list(prefix._experts)
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

  async def _run(self, job: _Job) -> Snapshot | None:
    """Waits until a job is done; a cancelled wait gives the slot back at once."""
    context = job.context
    if self._error is not None:
      raise EngineError(f"the engine stopped: {self._error}") from self._error
    if not self._weights:
      raise EngineError("no weights yet: call publish(params, version) first.")
    context._job = job
    self._submitted += 1
    if context._home is None:
      heapq.heappush(self._waiting, (context._priority, self._submitted, job))
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
      self._unpark(job.context)
      self._start(*home, job)
    for entry in not_ready:
      heapq.heappush(self._waiting, entry)

  def _find_slot(self) -> tuple[_Lane, int] | None:
    """A slot of the emptiest lane, or that of the longest idle context."""
    lane = max(self._lanes, key=lambda lane: len(lane.free))
    if lane.free:
      return lane, lane.free.pop()
    if self._parked >= self.config.max_parked:
      return None
    idle = [next(iter(lane.idle.items())) for lane in self._lanes if lane.idle]
    if not idle:
      return None
    context = min(idle, key=lambda item: item[1])[0]
    assert context._home is not None
    lane, slot = context._home
    del lane.idle[context]
    lane.evictions.append((context, slot))
    context._home, context._parking, context._parked = None, True, True
    self._parked += 1
    self.stats.parked += 1
    return lane, slot

  def _unpark(self, context: Context) -> None:
    if context._parked:
      context._parked = False
      self._parked -= 1

  def _drop(self, context: Context, why: str) -> None:
    """Ends a context: its slot is free at once, its call under way fails."""
    if context._lost is not None:
      return
    context._lost = why
    self._unpark(context)
    context._base = None
    context._pending.clear()
    if context._home is not None:
      lane, slot = context._home
      lane.idle.pop(context, None)
      lane.drop(slot)
      context._home = None
    job, context._job = context._job, None
    if job is not None and not job.over:
      job.future.set_exception(EngineError(f"the context cannot be used: {why}."))
    self._admit()

  async def _drive(self, lane: _Lane) -> None:
    """Runs cycles while the lane has work."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    cycle = None
    try:
      while True:
        await self._settle(lane)
        cycle = lane.plan(self._weights[lane.slots.device])
        if cycle is None:
          return
        outcome = await loop.run_in_executor(lane.thread, lane.execute, cycle)
        lane.finish(cycle, outcome)
        self._account(cycle, outcome)
        self._admit()
    except asyncio.CancelledError:
      # The loop is shutting down; the thread may still be at work on these slots.
      for context in [job.context for job in lane.jobs.values()]:
        self._drop(context, "the event loop ended")
      for context, _ in cycle.evictions if cycle else ():
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
    stats.extended_tokens += sum(len(ids) for _, ids in cycle.runs)
    if outcome.chunk is not None:
      stats.decode_dispatches += 1
      stats.sampled_tokens += int(outcome.chunk.counts.sum())

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
