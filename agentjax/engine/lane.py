"""One lane: a block of slots, the calls that use them, and a thread that works in cycles."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from agentjax.engine.context_state import ContextState
from agentjax.engine.prefix_cache import Entry, PrefixCache, token_ids
from agentjax.engine.request import Chunk, DecodePlan, EngineError, Generation, SampleRequest
from agentjax.engine.slots import Routed, SlotEngine, Weights
from agentjax.engine.store import Snapshot, Stored

_ticks = itertools.count()


class Job:
  """A call of a context: a generation, or (None) a snapshot of what it is."""

  def __init__(self, context: ContextState, generation: Generation | None) -> None:
    self.context = context
    self.generation = generation
    self.forcing: Generation | None = None  # sampled tokens on their way back in
    self.turn_base: Snapshot | None = None  # the context before the call
    self.placed = context.home is not None
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
class Read:
  """A context to be copied out of its slot, and what is then done with it in the event loop."""

  slot: int
  known: tuple[Stored, ...]
  use: Callable[[Snapshot], None]


@dataclasses.dataclass
class Round:
  """At most one piece for every slot, then copies of what the slots hold."""

  runs: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)
  reads: list[Read] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Cycle:
  """Device work of one lane, in this order; plain data for its thread."""

  weights: Weights
  evictions: list[Read]
  leaving: list[ContextState]  # whose evictions these are
  placements: list[tuple[Snapshot | None, list[int]]] = dataclasses.field(default_factory=list)
  rounds: list[Round] = dataclasses.field(default_factory=list)
  policies: dict[int, int] = dataclasses.field(default_factory=dict)  # by slot, of the placements
  running: dict[int, ContextState] = dataclasses.field(default_factory=dict)  # by slot, of the runs
  decoding: list[tuple[int, Job]] = dataclasses.field(default_factory=list)
  plan: DecodePlan | None = None
  reused: int = 0  # tokens taken from known prefixes


@dataclasses.dataclass
class Outcome:
  """What a cycle gave."""

  read: list[tuple[Read, Snapshot]]
  routed: list[Routed]
  chunk: Chunk | None
  seconds: float


class Lane:
  """A block of slots with a thread of its own. All but ``execute`` runs in the event loop."""

  def __init__(self, slots: SlotEngine, index: int, known: Sequence[PrefixCache]) -> None:
    self.slots = slots
    self.free = list(range(slots.slots))[::-1]
    self.jobs: dict[int, Job] = {}
    self.idle: dict[
      ContextState, int
    ] = {}  # contexts that keep a slot without a call, oldest first
    self.evictions: list[Read] = []
    self.leaving: list[ContextState] = []
    self.woken: list[ContextState] = []  # contexts whose calls the last cycle ended
    self.task: asyncio.Task[None] | None = None
    self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"engine-{index}")
    self._known = known

  def plan(self, weights: Weights) -> Cycle | None:
    """The next cycle; None where there is nothing to do."""
    cycle = Cycle(weights, self.evictions, self.leaving)
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
        cycle.policies[slot] = job.context.policy
        job.context.placed()
        job.placed = True
    cycle.placements = list(arrivals.values())
    self._plan_rounds(cycle)
    for slot, job in self.jobs.items():
      generation = self._decoding(job) if job.placed else None
      if generation is not None:
        cycle.plan = cycle.plan or self.slots.idle_plan()
        generation.write(cycle.plan, slot, self._room(job.context))
        cycle.decoding.append((slot, job))
    return cycle

  def execute(self, cycle: Cycle) -> Outcome:
    """Runs a cycle; in the lane's thread."""
    start = time.perf_counter()
    slots, traces = self.slots, self.slots.programs.traces_here
    slots.use(cycle.weights)
    read = [(item, slots.read(item.slot, item.known)) for item in cycle.evictions]
    for slot, policy in cycle.policies.items():
      slots.policies[slot] = policy
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
    return Outcome(read, routed, chunk, time.perf_counter() - start)

  def finish(self, cycle: Cycle, outcome: Outcome) -> list[ContextState]:
    """Hands the results of a cycle to their contexts; those whose log-probs are not finite."""
    self.woken = []
    for routed in outcome.routed:
      cycle.running[routed.slot].experts.record(routed.start, routed.experts())
    for item, snapshot in outcome.read:
      item.use(snapshot)
    broken = []
    for slot, job in cycle.decoding:
      if job.over or outcome.chunk is None:
        continue
      log_probs = outcome.chunk.behaviour_log_probs[slot, : int(outcome.chunk.counts[slot])]
      if np.isfinite(log_probs).all():
        self._read(slot, job, outcome.chunk, cycle.weights.versions[job.context.policy])
      else:
        broken.append(job.context)
    return broken

  def drop(self, slot: int) -> None:
    """Frees a slot, whatever it was doing."""
    self.jobs.pop(slot, None)
    self.free.append(slot)

  def insert(
    self, ids: np.ndarray, snapshot: Snapshot, context: ContextState, *, fresh: bool
  ) -> None:
    """Lets others begin where ``context`` was after ``ids``."""
    experts = context.experts.array()
    kept = None if experts is None else experts[: len(ids)]
    self._known[context.policy].insert(ids, Entry(snapshot, kept, fresh))

  def _base(self, context: ContextState, cycle: Cycle) -> Snapshot | None:
    """Where a context starts from; it has noted what is then left for it to take in.

    A bare prefix of older weights is run again; a context that has sampled keeps its past.
    """
    base, origin = context.base, context.origin
    version, known = cycle.weights.versions[context.policy], self._known[context.policy]
    if base is not None and (origin is None or base.version == version):
      return base
    if base is not None:
      context.begin_again()
    if context.held or not context.extends_next:
      return None
    context.first_run, context.last_boundary = context.pending[0].ids, 0
    found = known.find(context.first_run) if known.version == version else None
    if found is None:
      return None
    tokens, entry = found
    base = self.slots.cut(entry.snapshot, tokens)
    whole = tokens % self.slots.config.extend_buckets[-1] == 0
    experts = None if entry.experts is None else entry.experts[:tokens]
    context.begin_known(base, experts, shares_more=entry.fresh and whole)
    cycle.reused += tokens
    return base

  def _plan_rounds(self, cycle: Cycle) -> None:
    """Pieces of what waits to be taken in, by priority, as far as the cycle's budget goes."""
    config, budget = self.slots.config, self.slots.config.prefill_tokens
    placed = [item for item in self.jobs.items() if item[1].placed]
    queue = sorted(placed, key=lambda item: item[1].order)
    while queue:
      part, left = Round(), []
      for slot, job in queue:
        context = job.context
        if context.extends_next:
          if budget <= 0:
            continue
          run = context.first_run
          if run is not None and context.held >= len(run):
            context.first_run = None
          ids = context.next_piece(config.extend_buckets[-1])
          budget -= next(b for b in config.extend_buckets if b >= len(ids))
          part.runs.append((slot, token_ids(ids)))
          cycle.running[slot] = context
          context.take(ids, cycle.weights.versions[context.policy])
          if not context.pending or context.extends_next:
            self._plan_boundary(part, slot, context)
            left.append((slot, job))
        if not context.pending and (job.generation is None or job.needs_turn_base):
          part.reads.append(Read(slot, context.blocks, self._job_reader(slot, job)))
      if part.runs or part.reads:
        cycle.rounds.append(part)
      queue = [item for item in left if item[1].context.pending]

  def _plan_boundary(self, part: Round, slot: int, context: ContextState) -> None:
    """Keeps a long prompt's beginning where others may share it."""
    run, held = context.first_run, context.held
    if run is None or held >= len(run) or self.slots.config.prefix_reuse == "none":
      return
    if held - context.last_boundary >= self.slots.config.snapshot_tokens:
      context.last_boundary = held
      version = context.version

      def keep(snapshot: Snapshot) -> None:
        context.keep_blocks(snapshot.blocks[: held // self.slots.programs.block_tokens])
        self.insert(run[:held], dataclasses.replace(snapshot, version=version), context, fresh=True)

      part.reads.append(Read(slot, context.blocks, keep))

  def _job_reader(self, slot: int, job: Job) -> Callable[[Snapshot], None]:
    """What happens to a snapshot that a job waits for, or needs before it samples."""
    context = job.context
    run, version = context.first_run, context.version

    def use(snapshot: Snapshot) -> None:
      if job.over:
        return
      snapshot = dataclasses.replace(snapshot, version=version)
      context.keep_blocks(snapshot.blocks)
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

  def _read(self, slot: int, job: Job, chunk: Chunk, version: int) -> None:
    context, count = job.context, int(chunk.counts[slot])
    experts = None if chunk.experts is None else chunk.experts[slot, :count]
    first = context.newest
    context.take_decoded(chunk.token_ids[slot, :count], experts, version)
    room = self._room(context)
    if job.forcing is not None:
      if job.forcing.read(chunk, slot, room, version, first):
        context.pending.popleft()
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
      context.rewind(job.turn_base, generation.result().token_ids)
      del self.idle[context]
      self.free.append(slot)

  def _end(self, slot: int, job: Job, result: Snapshot | None) -> None:
    del self.jobs[slot]
    job.context.job = None
    self.idle[job.context] = next(_ticks)
    self.woken.append(job.context)
    job.future.set_result(result)

  def _room(self, context: ContextState) -> int:
    return self.slots.config.max_length - context.held
