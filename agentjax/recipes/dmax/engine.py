"""An engine whose contexts draw their text in blocks, many tokens a forward pass.

It serves the same programs as ``agentjax.engine.Engine``: contexts, prompts and forks. A call takes
a slot, runs its context's whole blocks through the model, then decides one block after the other.
Calls join and leave between two blocks. A context without a call holds its ids alone, so that a
later call runs them again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import ConfigError
from agentjax.engine import (
  Context,
  ContextLengthError,
  Engine,
  EngineBusyError,
  EngineConfig,
  EngineError,
  EngineStats,
  Finish,
  ImageError,
  NonFiniteError,
  Prefix,
  Sample,
  SampleRequest,
  SamplingConfig,
)
from agentjax.engine.slots import token_array
from agentjax.models import ModelConfig, Params, init_cache, prepare_decode_params
from agentjax.recipes.dmax.config import DMaxConfig
from agentjax.recipes.dmax.decoding import BlockDecoder, BlockPlan
from agentjax.sharding import dispatching

_PREFILL = 64  # tokens of a slot that one dispatch of a prompt runs, rounded to blocks; ours


@dataclasses.dataclass
class BlockStats(EngineStats):
  """Totals since the engine was made.

  Attributes:
    forwards: passes that decided tokens, summed over calls.
    commits: passes that wrote a decided block into the cache, likewise.
    blocks: that were decided.
  """

  forwards: int = 0
  commits: int = 0
  blocks: int = 0

  @property
  def tokens_per_forward(self) -> float:
    """Tokens of the results a forward pass, those of ``commits`` included; those of prompts are
    not."""
    return self.sampled_tokens / max(self.forwards + self.commits, 1)

  @property
  def tokens_per_decision(self) -> float:
    """Tokens of the results a pass that decided tokens: what the paper counts."""
    return self.sampled_tokens / max(self.forwards, 1)


@dataclasses.dataclass(eq=False)
class _Call:
  """A call under way."""

  ids: list[int]  # of the context, and what was drawn
  request: SampleRequest
  priority: tuple[int, ...]
  future: asyncio.Future[Sample]
  held: int = 0  # tokens that its slot holds: whole blocks
  finish: Finish | None = None  # why it ends; None while it goes on
  finite: bool = True  # all log-probs so far; else it ends without a result
  drawn: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)

  @property
  def count(self) -> int:
    """Tokens drawn."""
    return sum(len(part[0]) for part in self.drawn)


class BlockContext(Context):
  """A conversation; see ``Context``."""

  def __init__(
    self, engine: BlockEngine, ids: Sequence[int], priority: tuple[int, ...] = ()
  ) -> None:
    self._blocks, self._ids, self._priority = engine, list(ids), priority
    self._call: _Call | None = None
    self._closed = False

  def __len__(self) -> int:
    return len(self._ids)

  @property
  def room(self) -> int:
    return self._blocks.max_tokens - len(self)

  @property
  def experts(self) -> None:
    return None

  async def extend(self, token_ids: Sequence[int] | np.ndarray, *, images: Any = ()) -> None:
    ids = self._blocks.keys(token_ids, images)
    if len(ids) > self.room:
      raise ContextLengthError(
        f"a context of {len(self)} tokens cannot take {len(ids)} more; allowed: "
        f"engine.max_length={self._blocks.max_tokens}."
      )
    self._ids += ids.tolist()

  async def generate(self, request: SampleRequest) -> Sample:
    self._check_usable()
    if not self._ids:
      raise ValueError("an empty context cannot sample: extend it by a prompt first.")
    if not self.room:
      raise ContextLengthError(f"a context of {len(self)} tokens has no room to sample.")
    self._call = self._blocks.submit(self._ids, request, self._priority)
    try:
      sample = await self._call.future
    finally:
      self._call = None
    self._ids += sample.token_ids.tolist()
    return sample

  async def fork(self, count: int) -> list[Context]:
    self._check_usable()
    return [BlockContext(self._blocks, self._ids, self._priority) for _ in range(count)]

  def close(self) -> None:
    self._closed = True
    if self._call is not None and not self._call.future.done():
      self._call.future.set_exception(EngineError("the context was closed."))

  def _check_usable(self) -> None:
    if self._closed:
      raise EngineError("the context was closed.")
    if self._call is not None:
      raise EngineError("the context has a call under way.")


class BlockEngine(Engine):
  """Draws text in blocks for many asyncio programs at once; see ``Engine``.

  Args:
    model_config: of the parameters to be published.
    config: slots, max_length, max_stop_ids and max_waiting are read.
    dmax: blocks and how they are decided.
    decode: not read.
    vocab_limit: ids from here on are never drawn.
    devices: the first is used.
    policies: 1.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: EngineConfig,
    dmax: DMaxConfig,
    *,
    decode: Any = None,
    vocab_limit: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    policies: int = 1,
  ) -> None:
    if policies != 1:
      raise ConfigError(f"{policies} policies share an engine of blocks; allowed: 1.")
    config.validate("engine")
    mask = dmax.mask_of(model_config)
    limit = model_config.vocab_size if vocab_limit is None else vocab_limit
    self.decode, self.model_config, self.config = decode, model_config, config
    self.others: tuple[Engine, ...] = ()
    self.decoder = BlockDecoder(model_config, dmax.decoding, dmax.block, mask, limit)
    self._stats, self._version = BlockStats(), -1
    self._params: tuple[Any, int] | None = None
    self._cache: Any = None
    self._device = (devices or jax.local_devices())[0]
    self._slots: list[_Call | None] = [None] * config.slots
    self._waiting: collections.deque[_Call] = collections.deque()
    self._driver: asyncio.Task[None] | None = None
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="blocks")
    self._error: Exception | None = None
    self._prepare = jax.jit(functools.partial(prepare_decode_params, config=model_config))

  @property
  def stats(self) -> BlockStats:
    return self._stats

  @property
  def stored_bytes(self) -> tuple[int, int]:
    return 0, 0

  @property
  def waiting(self) -> int:
    return len(self._waiting)

  @property
  def version(self) -> int:
    return self._version

  @property
  def max_tokens(self) -> int:
    return self.config.max_length

  def publish(self, params: Params, version: int) -> None:
    with dispatching():
      prepared = jax.device_put(self._prepare(params), self._device)
    self._params, self._version = (jax.block_until_ready(prepared), version), version
    self._stats.publications += 1

  async def release_weights(self) -> None:
    if self._driver is not None:
      await asyncio.wait([self._driver])
    self._params = None

  def keys(self, token_ids: Sequence[int] | np.ndarray, images: Any) -> np.ndarray:
    if images:
      raise ImageError("the model has no vision tower; allowed: images=().")
    return token_array(token_ids, self.model_config.vocab_size)

  async def prefill(
    self,
    token_ids: Sequence[int] | np.ndarray,
    *,
    priority: tuple[int, ...] = (),
    images: Any = (),
  ) -> Prefix:
    del priority
    context = BlockContext(self, ())
    await context.extend(token_ids, images=images)
    held: Any = ()  # nothing is held on the device
    return Prefix(held, np.asarray(token_ids, np.int32), None, 0)

  async def open(self, prefix: Prefix, *, priority: tuple[int, ...] = ()) -> Context:
    if prefix.snapshot is None:
      raise EngineError("the prefix was released.")
    return BlockContext(self, prefix.ids.tolist(), priority)

  async def open_ids(
    self,
    token_ids: Sequence[int] | np.ndarray,
    *,
    priority: tuple[int, ...] = (),
    images: Any = (),
  ) -> Context:
    context = BlockContext(self, (), priority)
    await context.extend(token_ids, images=images)
    return context

  def executables(self) -> tuple[str, ...]:
    return ("prefill", "decode")

  def close(self) -> None:
    self._fail(EngineError("the engine was closed."))
    self._thread.shutdown(wait=True)

  def submit(self, ids: Sequence[int], request: SampleRequest, priority: tuple[int, ...]) -> _Call:
    """A call on a context of these tokens, which gets a slot by priority, then by arrival.

    Raises:
      ValueError: the request has something that blocks are not drawn with.
      EngineBusyError: too many calls wait.
    """
    self._check(request)
    if self._error is not None:
      raise EngineError("the engine cannot go on.") from self._error
    most = self.config.max_waiting
    if most and len(self._waiting) >= most:
      raise EngineBusyError(f"{most} calls wait already (engine.max_waiting).")
    loop = asyncio.get_running_loop()
    call = _Call(list(ids), request, priority, loop.create_future())
    self._waiting.append(call)
    if self._driver is None or self._driver.done():
      self._driver = loop.create_task(self._drive())
    return call

  def _check(self, request: SampleRequest) -> None:
    request.sampling.validate()
    request.check_ids(self.model_config.vocab_size)
    filtered = dataclasses.replace(request.sampling, temperature=1.0) != SamplingConfig()
    for name, given in (
      ("top_k, top_p or min_p", filtered),
      ("stop_strings", request.stop_strings),
      ("forced_ids", request.forced_ids),
      ("a grammar", request.grammar is not None),
    ):
      if given:
        raise ValueError(f"{name} in a request; allowed: none where tokens are drawn in blocks.")
    if len(request.stop_ids) > self.config.max_stop_ids:
      raise ValueError(
        f"{len(request.stop_ids)} stop_ids; allowed: engine.max_stop_ids="
        f"{self.config.max_stop_ids}."
      )

  async def _drive(self) -> None:
    """Cycles of all slots, as long as there are calls."""
    loop = asyncio.get_running_loop()
    try:
      while self._take_in():
        if self._params is None:
          raise EngineError("no weights were published.")
        await loop.run_in_executor(self._thread, self._cycle, *self._params)
        self._hand_out()
        await asyncio.sleep(0)  # programs that go on submit their next calls
    except Exception as error:
      self._fail(error)

  def _take_in(self) -> bool:
    """Gives free slots to waiting calls; whether any call is under way."""
    self._slots = [None if c is None or c.future.done() else c for c in self._slots]
    waiting = sorted((c for c in self._waiting if not c.future.done()), key=lambda c: c.priority)
    for slot, call in enumerate(self._slots):
      if call is None and waiting:
        self._slots[slot] = waiting.pop(0)
    self._waiting = collections.deque(waiting)
    return any(self._slots)

  def _cycle(self, params: Any, version: int) -> None:
    """Runs the prompts of new calls and decides a block of every call. In the engine's thread."""
    began = time.perf_counter()
    with dispatching():
      if self._cache is None:
        empty = init_cache(self.model_config, self.config.slots, self.config.max_length)
        self._cache = jax.device_put(empty, self._device)
      self._run_prompts(params)
      plan = self._plan()
      self._cache, found = self.decoder.decode(params, self._cache, plan)
      found = jax.device_get(found)
    self._stats.device_seconds += time.perf_counter() - began
    block = self.decoder.block
    for slot, call in enumerate(self._slots):
      if call is None:
        continue
      known, count = int(plan.known[slot]), int(found.counts[slot])
      new = slice(known, known + count)
      columns = (found.ids[slot, new], found.log_probs[slot, new], found.entropies[slot, new])
      call.drawn.append((*columns, np.full(count, version, np.int32)))
      call.ids += columns[0].tolist()
      self._stats.forwards += int(found.forwards[slot])
      self._stats.sampled_tokens += count
      self._stats.blocks += 1
      call.finite = bool(found.finite[slot])
      call.finish = self._finish(call, bool(found.stopped[slot]))
      if call.finite and call.finish is None:
        call.held += block
        self._stats.commits += 1

  def _run_prompts(self, params: Any) -> None:
    """Runs the whole blocks of the prompts of calls that have just got their slot."""
    block, slots = self.decoder.block, len(self._slots)
    width = max(_PREFILL // block, 1) * block
    fresh = np.array([c is not None and not c.drawn for c in self._slots])
    if not fresh.any():
      return
    while True:
      ids, counts = np.zeros((slots, width), np.int32), np.zeros(slots, np.int32)
      for slot, call in enumerate(self._slots):
        if call is None or call.drawn:
          continue
        part = call.ids[call.held : min(call.held + width, len(call.ids) // block * block)]
        ids[slot, : len(part)], counts[slot] = part, len(part)
        call.held += len(part)
      if not counts.any() and not fresh.any():
        return
      self._cache = self.decoder.prefill(params, self._cache, ids, counts, fresh)
      self._stats.extended_tokens += int(counts.sum())
      fresh = np.zeros(slots, bool)

  def _plan(self) -> BlockPlan:
    """The next block of every call, as numpy arrays."""
    slots, block = len(self._slots), self.decoder.block
    plan = BlockPlan(
      ids=np.zeros((slots, block), np.int32),
      known=np.zeros(slots, np.int32),
      active=np.zeros(slots, bool),
      left=np.zeros(slots, np.int32),
      key_data=np.zeros((slots, 2), np.uint32),
      temperature=np.zeros(slots, np.float32),
      stop_ids=np.full((slots, self.config.max_stop_ids), -1, np.int32),
    )
    for slot, call in enumerate(self._slots):
      if call is None:
        continue
      tail = call.ids[call.held :]
      plan.ids[slot, : len(tail)], plan.known[slot] = tail, len(tail)
      plan.active[slot] = True
      plan.left[slot] = min(
        call.request.max_tokens - call.count, self.config.max_length - len(call.ids)
      )
      plan.key_data[slot] = call.request.key_data
      plan.temperature[slot] = call.request.sampling.temperature
      plan.stop_ids[slot, : len(call.request.stop_ids)] = call.request.stop_ids
    return plan

  def _finish(self, call: _Call, stopped: bool) -> Finish | None:
    """Why a call ends; None if it goes on."""
    if stopped:
      return Finish.STOP
    if call.count >= call.request.max_tokens:
      return Finish.LENGTH
    return Finish.CONTEXT_FULL if len(call.ids) >= self.config.max_length else None

  def _hand_out(self) -> None:
    """Gives the calls that have ended their results."""
    for slot, call in enumerate(self._slots):
      if call is None or call.future.done():
        continue
      if not call.finite:
        call.future.set_exception(NonFiniteError("the log-probs of a block are not finite."))
      elif call.finish is not None:
        ids, log_probs, entropies, versions = (
          np.concatenate(column) for column in zip(*call.drawn, strict=True)
        )
        call.future.set_result(Sample(ids, log_probs, entropies, log_probs, versions, call.finish))
      else:
        continue
      self._slots[slot] = None

  def _fail(self, error: Exception) -> None:
    """Ends all calls."""
    self._error = error
    for call in (*self._slots, *self._waiting):
      if call is not None and not call.future.done():
        failed = EngineError("the engine cannot go on.")
        failed.__cause__ = error
        call.future.get_loop().call_soon_threadsafe(_end, call.future, failed)
    self._slots = [None] * len(self._slots)
    self._waiting.clear()


def _end(future: asyncio.Future[Sample], error: Exception) -> None:
  if not future.done():
    future.set_exception(error)
