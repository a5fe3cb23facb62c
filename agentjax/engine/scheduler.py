"""Continuous batching: who gets a slot, who makes room, and the cycles of the lanes.

Each lane has one thread for device work. It runs in cycles: it takes in waiting tokens, up to
``prefill_tokens``, then decodes one chunk for all slots. Meanwhile the event loop runs tools and
environments, and plans the next cycle. That is dispatched before the results of the last are read,
if these cannot change it (``Lane.may_go_ahead``) and it pays (``Pace``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from agentjax.config import check
from agentjax.engine.config import EngineConfig
from agentjax.engine.context_state import ContextState
from agentjax.engine.home import Home, make_homes
from agentjax.engine.lane import Cycle, Job, Lane, Read, Results, Running
from agentjax.engine.mirror import make_mirror
from agentjax.engine.prefix_cache import ImageKeys, PrefixCache
from agentjax.engine.publish import Publisher, Weights
from agentjax.engine.request import (
  EngineBusyError,
  EngineError,
  Generation,
  NonFiniteError,
  SharedLanesError,
)
from agentjax.engine.slots import SlotEngine, make_store
from agentjax.engine.store import HeldPiece, Snapshot
from agentjax.models import ModelConfig, Params

T = TypeVar("T")


@dataclasses.dataclass
class EngineStats:
  """Totals since the engine was made.

  Attributes:
    sampled_tokens: tokens decoded, forced and dropped ones included.
    extended_tokens: prompt and observation tokens run through the model.
    reused_tokens: those taken from a known prefix instead.
    decode_dispatches: chunks run.
    ahead_dispatches: of these, the ones that were dispatched before the results of the chunk before
      them were read.
    parked: contexts that had to leave their slot or their pages to others.
    store_overruns: those of them that did not fit in the store; no slot was at work, so waiting
      might never have ended.
    drafted_tokens, accepted_tokens: tokens that speculation proposed, and those that were right.
    device_seconds: wall seconds from the begin to the end of the lanes' dispatches, summed over
      lanes.
    idle_seconds: wall seconds from the end of a dispatch to the begin of the next one, as far as
      calls were under way, summed over lanes.
    publications, published_bytes, publish_seconds: weights that were laid out for the lanes, of all
      copies, and the wall seconds it took.
  """

  sampled_tokens: int = 0
  extended_tokens: int = 0
  reused_tokens: int = 0
  decode_dispatches: int = 0
  ahead_dispatches: int = 0
  parked: int = 0
  store_overruns: int = 0
  drafted_tokens: int = 0
  accepted_tokens: int = 0
  device_seconds: float = 0.0
  idle_seconds: float = 0.0
  publications: int = 0
  published_bytes: int = 0
  publish_seconds: float = 0.0

  @property
  def idle_share(self) -> float:
    """Of the time in which calls were under way, in how much the device waited for the host."""
    whole = self.device_seconds + self.idle_seconds
    return self.idle_seconds / whole if whole else 0.0


class Scheduler:
  """Gives slots to calls by priority, then by arrival.

  Attributes:
    lanes: the slots, in blocks.
    store: what contexts without a slot are kept in.
    known: prefixes that contexts may begin with, by policy.
    image_keys: of the images in them.
    stats: totals.

  Args:
    model_config: of the parameters to be published.
    config: sizes.
    vocab_limit, devices, policies: see ``Engine``.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: EngineConfig,
    vocab_limit: int | None,
    devices: Sequence[jax.Device] | None,
    policies: int = 1,
  ) -> None:
    config.validate("engine")
    check(
      policies == 1 or config.mesh.expert == 1,
      "engine.mesh.expert",
      config.mesh.expert,
      f"1 where {policies} policies share an engine: experts on other devices get no adapters",
    )
    self.stats = EngineStats()
    self.store = make_store(config)
    homes = make_homes(config, devices)
    self._mirror = make_mirror(homes)
    slots = [
      SlotEngine(
        model_config,
        config,
        home=home,
        vocab_limit=vocab_limit,
        store=self.store,
        by_policy=policies > 1,
        mirror=self._mirror,
        number=number,
      )
      for number, home in enumerate(homes)
    ]
    if self._mirror is not None:
      self.store.fetch = slots[0].device.fetch
      self._mirror.begin([engine.device for engine in slots])
    self.known = tuple(
      PrefixCache(
        config.extend_buckets[-1],
        any_history=config.prefix_reuse == "turns",
        may_cut=slots[0].may_cut if slots[0].programs.attention_only else None,
      )
      for _ in range(policies)
    )
    self.image_keys = ImageKeys()
    self.lanes = [Lane(engine, i, self.known) for i, engine in enumerate(slots)]
    self.model_config = self.lanes[0].slots.model_config
    self.config = self.lanes[0].slots.config
    self._publisher = Publisher({engine.home: engine.programs for engine in slots}, policies)
    self._weights: dict[Home, Weights] = {}
    self._known_of = (0,) * policies  # publications that the known prefixes were made with
    self._queue: list[tuple[tuple[int, ...], int, Job]] = []
    self._submitted = 0
    self._error: Exception | None = None

  @property
  def _follows(self) -> bool:
    """Whether another process decides what the lanes do."""
    return self._mirror is not None and not self._mirror.leads

  @property
  def max_tokens(self) -> int:
    """That a context can hold."""
    return self.lanes[0].slots.programs.max_tokens

  @property
  def limit(self) -> str:
    """The same, with the setting that says so."""
    return self.lanes[0].slots.limit

  @property
  def waiting(self) -> int:
    """Calls that wait for a slot."""
    return sum(not job.over for _, _, job in self._queue)

  def version(self, policy: int) -> int:
    """Version of a policy's weights in use; -1 before the first ``publish``."""
    return next((w.versions[policy] for w in self._weights.values()), -1)

  async def in_lane(self, function: Callable[[Weights], T]) -> T:
    """What a function makes of the weights in use, in the thread of the first lane, between its
    cycles."""
    slots, thread = self.lanes[0].slots, self.lanes[0].thread
    if not self._weights:
      raise EngineError("no weights yet: call publish(params, version) first.")
    weights = self._weights[slots.home]

    def call() -> T:
      slots.use(weights)
      return function(weights)

    return await asyncio.get_running_loop().run_in_executor(thread, call)

  async def join(self, pieces: Sequence[HeldPiece], before: Snapshot | None) -> Snapshot:
    """See ``SlotEngine.join``."""
    return await self.in_lane(lambda _: self.lanes[0].slots.join(pieces, before))

  def publish(self, params: Params, version: int, policy: int) -> None:
    """See ``Engine.publish``."""
    weights = self._publisher(params, version, policy)
    self.stats.publications += 1
    self.stats.published_bytes += self._publisher.nbytes
    self.stats.publish_seconds += self._publisher.seconds
    if self._mirror is not None:
      self._mirror.published([weights[lane.slots.home] for lane in self.lanes])
    if not self._weights and not self._follows:  # nothing runs
      for lane in self.lanes:
        lane.slots.use(weights[lane.slots.home])
        if self.config.warmup and not lane.slots.warm:
          lane.slots.warmup()
    self._weights = weights

  async def release_weights(self) -> None:
    """See ``Engine.release_weights``."""
    while tasks := [lane.task for lane in self.lanes if lane.task and not lane.task.done()]:
      await asyncio.wait(tasks)
    self._publisher.release()
    self._weights.clear()  # in place: nothing else may keep them
    if self._follows:  # its lanes let go when the others' do
      return
    for lane in self.lanes:
      lane.slots.use(None)

  def close(self) -> None:
    """Ends the threads. Calls under way fail."""
    self.fail(EngineError("the engine was closed"))
    for lane in self.lanes:
      lane.thread.shutdown(wait=True)
      lane.waiter.shutdown(wait=True)
      lane.under_way.clear()  # of an event loop that ended in the middle
      lane.evictions.clear()
      for slot in range(lane.slots.slots):
        lane.slots.release(slot)
      for pool in lane.slots.pools:
        pool.wanted.clear()
    if self._mirror is not None:
      self._mirror.close()
    for known in self.known:
      known.clear(-1)

  async def run(self, context: ContextState, generation: Generation | None) -> Snapshot | None:
    """Waits until a call is done; a cancelled wait gives the slot back at once.

    Args:
      context: usable.
      generation: what it samples; None takes in what is pending and gives a snapshot.
    """
    if self._error is not None:
      raise self._stopped(self._error)
    if self._follows:
      raise EngineError(
        f"the lanes of this process are led by process {self.lanes[0].slots.home.processes[0]} "
        "(engine.processes), which plays the episodes; sample there."
      )
    if self.version(context.policy) < 0:
      raise EngineError("no weights yet: call publish(params, version) first.")
    limit = self.config.max_waiting
    if limit and context.home is None and self.waiting >= limit:
      raise EngineBusyError(
        f"{self.waiting} calls wait for a slot; allowed: engine.max_waiting={limit}. Try again "
        f"when others have ended, or raise engine.max_waiting or engine.slots."
      )
    job = context.job = Job(context, generation)
    self._submitted += 1
    job.order = (context.priority, self._submitted)
    if context.home is None:
      heapq.heappush(self._queue, (*job.order, job))
      self._admit()
    else:
      lane, slot = context.home
      del lane.idle[context]
      self._start(lane, slot, job)
    try:
      return await job.future
    except asyncio.CancelledError:
      self.drop(context, "its call was cancelled")
      raise

  def _start(self, lane: Lane, slot: int, job: Job) -> None:
    lane.jobs[slot] = job
    self._wake(lane)

  def _wake(self, lane: Lane) -> None:
    try:
      loop = asyncio.get_running_loop()
    except RuntimeError:  # a context was closed outside one: calls go on where they are awaited
      for waiting in {job.future.get_loop() for job in lane.jobs.values()}:
        if not waiting.is_closed():
          waiting.call_soon(self._wake, lane)
      return
    if lane.task is None or lane.task.get_loop() is not loop:
      lane.task = loop.create_task(self._drive(lane))

  def _admit(self) -> None:
    """Gives slots to waiting jobs, in order."""
    not_ready = []
    while self._queue:
      entry = self._queue[0]
      job = entry[2]
      if job.over or job.context.parking:
        heapq.heappop(self._queue)
        if not job.over:
          not_ready.append(entry)
        continue
      home = self._find_slot(job.context)
      if home is None:
        break
      heapq.heappop(self._queue)
      job.context.home = home
      self._start(*home, job)
    for entry in not_ready:
      heapq.heappush(self._queue, entry)

  def _find_slot(self, newcomer: ContextState) -> tuple[Lane, int] | None:
    """A free slot near its pages, or of the emptiest lane; or that of the longest idle context."""
    blocks = newcomer.base.stored if newcomer.base else ()
    pages = blocks[0].pages if blocks else ()
    near = [lane for lane in self.lanes if any(pool in pages for pool in lane.slots.pools)]
    lane = max(self.lanes, key=lambda lane: (bool(lane.free) and lane in near, len(lane.free)))
    if lane.free:
      return lane, lane.free.pop()
    idle = [next(iter(lane.idle.items())) for lane in self.lanes if lane.idle]
    if not idle:
      return None
    context = min(idle, key=lambda item: item[1])[0]
    if not self._make_room(context):
      if any(lane.jobs for lane in self.lanes):
        return None
      # Else the device could stand still for ever: slots may wait for those who wait.
      self.stats.store_overruns += 1
    assert context.home is not None
    lane, slot = context.home
    del lane.idle[context]
    context.leave()
    self.stats.parked += 1
    lane.evictions.append(Read(slot, context.parked))
    lane.leaving.append(context)
    return lane, slot

  def _make_room(self, context: ContextState) -> bool:
    """Whether a context can be stored, once known prefixes have made way."""
    programs = self.lanes[0].slots.programs
    needed = programs.context_bytes(context.places)
    while not self.store.room_for(needed):
      if not any(known.evict() for known in self.known):
        return False
    return True

  def drop(self, context: ContextState, why: str, error: type[EngineError] = EngineError) -> None:
    """Ends a context: its slot is free at once, its call under way fails."""
    if context.lost is not None:
      return
    context.lose(why)
    if context.home is not None:
      lane, slot = context.home
      lane.idle.pop(context, None)
      lane.drop(slot)
      context.home = None
    job, context.job = context.job, None
    if job is not None and not job.over and not job.future.get_loop().is_closed():
      job.future.set_exception(error(f"the context cannot be used: {why}."))
    self._admit()

  def remember(self, context: ContextState) -> None:
    """Keeps what a closing context holds in its slot for those that begin alike."""
    ids = context.ids.array()
    if context.home is None or context.version != self.version(context.policy) or ids is None:
      return
    if context.layout is not None:  # what it holds is not what its ids alone would give
      return
    if len(ids) != context.held or not self._make_room(context):
      return
    (lane, slot), version = context.home, context.version
    lane.evictions.append(
      Read(
        slot,
        lambda snapshot: lane.insert(
          ids, dataclasses.replace(snapshot, version=version), context, fresh=False
        ),
      )
    )
    self._wake(lane)

  async def _drive(self, lane: Lane) -> None:
    """Runs cycles while the lane has work."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    cycle: Cycle | None = None
    lane.pace.begin()
    try:
      if any(one.results is None or one.results.get_loop() is not loop for one in lane.under_way):
        self._interrupt(lane, None, loop)  # the last event loop was stopped and cancelled nothing
      if lane.interrupted:  # wait for what it left at work
        for thread in (lane.thread, lane.waiter):
          await loop.run_in_executor(thread, lambda: None)
        lane.under_way.clear()
        lane.interrupted = False
      while True:
        if lane.running is not None and not await self._goes_ahead(lane, lane.running):
          await self._read(lane)
        await self._settle(lane)
        if not self._weights:
          return  # released; what is to be remembered waits
        cycle = lane.plan(self._take_weights(lane))
        self._wake_others(lane)
        if cycle is not None:
          await self._start_cycle(lane, cycle)
          cycle = None
          if len(lane.under_way) > 1:
            await self._read(lane)
        elif lane.under_way:
          await self._read(lane)
        else:
          return
    except asyncio.CancelledError:
      # The loop is shutting down; the threads may still be at work on these slots.
      self._interrupt(lane, cycle)
      raise
    except Exception as error:
      self.fail(error)
    finally:
      if lane.task is task:
        lane.task = None

  async def _goes_ahead(self, lane: Lane, running: Running) -> bool:
    """Whether the next cycle comes before the results of the last; then, waits for the moment."""
    if not (lane.may_go_ahead and lane.pace.ahead):
      return False
    assert running.results is not None
    await asyncio.wait({running.results}, timeout=lane.pace.hold_back(running.start))
    return not running.results.done() and lane.may_go_ahead

  def _take_weights(self, lane: Lane) -> Weights:
    """Those of the next cycle; forgets prefixes of others."""
    weights = self._weights[lane.slots.home]  # another thread may publish new ones
    counts = zip(weights.publications, self._known_of, strict=True)
    for policy, (now, then) in enumerate(counts):
      if now != then:
        self.known[policy].clear(weights.versions[policy])
    self._known_of = weights.publications
    return weights

  async def _start_cycle(self, lane: Lane, cycle: Cycle) -> None:
    """Dispatches a cycle, and lets a thread wait for its results."""
    loop = asyncio.get_running_loop()
    running = await loop.run_in_executor(lane.thread, lane.dispatch, cycle)
    running.results = loop.run_in_executor(lane.waiter, running.wait)
    lane.under_way.append(running)
    if cycle.wanted:
      for other in self.lanes:
        self._wake(other)

  async def _read(self, lane: Lane) -> None:
    """Takes the results of the oldest cycle under way."""
    running = lane.under_way[0]
    assert running.results is not None
    results = await running.results
    lane.under_way.popleft()
    for broken in lane.finish(running, results):
      self.drop(broken, "its log-probs are not finite", NonFiniteError)
    self._account(lane, running, results)
    self._admit()

  def _interrupt(
    self, lane: Lane, planned: Cycle | None, new: asyncio.AbstractEventLoop | None = None
  ) -> None:
    """Ends what a lane does where its event loop ends; its threads may still be at work.

    Args:
      lane: the lane.
      planned: a cycle that was not dispatched.
      new: an event loop whose calls go on.
    """
    for job in list(lane.jobs.values()):
      if job.future.get_loop() is not new:
        self.drop(job.context, "the event loop ended")
    cycles = [running.cycle for running in lane.under_way]
    for running in lane.under_way:
      if running.results is not None and not running.results.get_loop().is_closed():
        running.results.cancel()
    for cycle in cycles if planned is None else [*cycles, planned]:
      for context in cycle.leaving:
        self.drop(context, "the event loop ended")
      lane.interrupted = True
      lane.gone += [*cycle.gone, *(item.slot for item in cycle.evictions)]

  def _wake_others(self, lane: Lane) -> None:
    """Lets other lanes copy out what this one needs."""
    for other in self.lanes:
      if other is not lane and any(pool.wanted for pool in other.slots.pools):
        self._wake(other)

  async def _settle(self, lane: Lane) -> None:
    """Lets woken programs make their next call before the slots run on."""
    quiet = 0
    for _ in range(self.config.host_turns):
      before = self._submitted
      await asyncio.sleep(0)
      lane.woken = [c for c in lane.woken if c.job is None and c.lost is None]
      quiet = quiet + 1 if self._submitted == before else 0
      if quiet >= 3 and not lane.woken:
        return

  def _account(self, lane: Lane, running: Running, results: Results) -> None:
    stats, cycle, chunk = self.stats, running.cycle, results.chunk
    busy, idle = lane.pace.note_cycle(running.start, results.end, ahead=cycle.ahead)
    stats.device_seconds += busy
    stats.idle_seconds += idle
    stats.extended_tokens += sum(len(ids) for part in cycle.rounds for _, ids in part.runs)
    stats.reused_tokens += cycle.reused
    stats.parked += cycle.parked
    if chunk is not None:
      stats.decode_dispatches += 1
      stats.ahead_dispatches += cycle.ahead
      stats.sampled_tokens += int(chunk.counts.sum())
      if chunk.drafted is not None and chunk.accepted is not None:
        stats.drafted_tokens += int(chunk.drafted.sum())
        stats.accepted_tokens += int(chunk.accepted.sum())

  def fail(self, error: Exception) -> None:
    """Ends everything under way with ``error``."""
    self._error = self._error or error
    jobs = [entry[2] for entry in self._queue]
    jobs += [job for lane in self.lanes for job in lane.jobs.values()]
    self._queue = []
    for job in jobs:
      if not job.over:
        job.future.set_exception(self._stopped(error))

  def _stopped(self, error: Exception) -> EngineError:
    kind = EngineError if self._mirror is None else SharedLanesError
    failure = kind(f"the engine stopped: {error}")
    failure.__cause__ = error
    return failure
