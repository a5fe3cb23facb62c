"""The engine: contexts that sample, wait for the world, grow and fork, for asyncio.

Host programs hold a ``Context`` each; ``engine.scheduler`` gives them slots on the device.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import jax
import numpy as np

from agentjax.engine.config import EngineConfig, SamplingConfig
from agentjax.engine.context_state import ContextState
from agentjax.engine.grammar import check_fits
from agentjax.engine.prefix_cache import Images
from agentjax.engine.request import (
  ContextLengthError,
  Decode,
  EngineError,
  Generation,
  ImageError,
  Sample,
  SampleRequest,
)
from agentjax.engine.scheduler import EngineStats, Scheduler
from agentjax.engine.slots import token_array
from agentjax.engine.store import HeldPiece, Snapshot
from agentjax.models import ModelConfig, Params
from agentjax.models.pieces import Piece
from agentjax.models.stack import stream_kind


@functools.lru_cache(maxsize=64)
def _validate(sampling: SamplingConfig) -> None:
  """Checks settings once, though every turn brings them."""
  sampling.validate()


class Prefix:
  """A prompt that was run once and starts any number of contexts. ``release`` frees its memory.

  Attributes:
    snapshot: its content; None once it was released.
    ids: tokens of the prompt, and its images (see ``prefix_cache.ImageKeys``).
    experts: see ``Context.experts``.
    policy: number of the policy that it is a prompt of.
  """

  def __init__(
    self, snapshot: Snapshot, ids: np.ndarray, experts: np.ndarray | None, policy: int
  ) -> None:
    self.snapshot: Snapshot | None = snapshot
    self.ids, self.experts, self.policy = ids, experts, policy

  def __len__(self) -> int:
    return len(self.ids)

  def release(self) -> None:
    """Lets go of the device memory; contexts opened before live on."""
    self.snapshot = None


class Context:
  """One conversation with the policy. It needs a slot only while ``generate`` or ``fork`` runs.

  One call at a time. A call that is cancelled loses the context: only ``close`` is left.

  Attributes:
    state: what the scheduler knows of it.
  """

  def __init__(self, engine: Engine, state: ContextState) -> None:
    self._engine, self.state = engine, state

  def __len__(self) -> int:
    """Tokens of the context, those not yet run through the model included."""
    return len(self.state)

  @property
  def room(self) -> int:
    """Tokens it can still take."""
    return self._engine.max_tokens - len(self) - self.state.gap

  @property
  def experts(self) -> np.ndarray | None:
    """What the routers chose for the tokens run through the model so far, from the first on.

    Uint8 or uint16 [tokens, routers, choices] (see ``trajectory.experts``); None unless
    ``EngineConfig.record_experts``.
    """
    return self.state.experts.array()

  @property
  def columns(self) -> dict[str, np.ndarray]:
    """What is known of its tokens for their record, by column (``trajectory.columns``)."""
    experts = self.experts
    return {} if experts is None else {"experts": experts}

  async def extend(self, token_ids: Sequence[int] | np.ndarray, *, images: Images = ()) -> None:
    """Appends ids. The next ``generate`` or ``fork`` runs them through the model with all others'.

    Args:
      token_ids: what follows.
      images: of these tokens, each the place of its first one among them and the hash of its
        content (``trajectory.record.Image.sha256``).

    Raises:
      ContextLengthError: they do not fit; the context stays as it was.
      ImageError: the model has no vision tower.
    """
    self.state.check_usable()
    ids = self._engine.keys(token_ids, images)
    if len(ids) > self.room:
      raise ContextLengthError(
        f"a context of {len(self)} tokens cannot take {len(ids)} more; allowed: "
        f"{self._engine.scheduler.limit}."
      )
    self.state.add(ids)

  async def generate(self, request: SampleRequest) -> Sample:
    """Samples until a stop, ``max_tokens`` or a full context. The sample joins the context."""
    self.state.check_usable()
    if not len(self):
      raise ValueError("an empty context cannot sample: extend it by a prompt first.")
    if self.state.is_bare:
      raise ValueError("a context of pieces alone cannot sample: extend it by a token at least.")
    _validate(request.sampling)
    request.check_ids(self._engine.model_config.vocab_size)
    if request.grammar is not None:
      check_fits(request.grammar, self._engine.config, self._engine.model_config.vocab_size)
    generation = Generation(
      request,
      max_stop_ids=self._engine.config.max_stop_ids,
      decode=self._engine.decode,
    )
    await self._engine.scheduler.run(self.state, generation)
    return generation.result()

  async def append_pieces(self, pieces: Sequence[HeldPiece]) -> None:
    """Appends runs of tokens that were taken in by themselves (``Engine.keep_piece``), in a row.

    They see nothing of what is before them. Contexts share their pages. A token at least must
    follow before the context samples.

    Raises:
      ContextLengthError: they leave no room for another token.
      EngineError: pieces of other weights than those in use, or no weights are.
    """
    engine, state = self._engine, self.state
    engine.check_pieces()
    state.check_usable()
    if not pieces:
      raise ValueError("0 pieces; allowed: one or more.")
    before = state.base
    if state.pending or state.home is not None or state.parking or state.origin is not None:
      before = await engine.scheduler.run(state, None)
    joined = await engine.scheduler.join(pieces, before)
    self.state = ContextState(state.priority, state.policy)
    self.state.begin_with_pieces(joined)
    engine.scheduler.drop(state, "it goes on with pieces behind it")

  async def fork(self, count: int) -> list[Context]:
    """``count`` new contexts that go on from here, each on its own; this one stays usable."""
    self.state.check_usable()
    state, engine = self.state, self._engine
    base, origin = state.base, state.origin
    if state.pending or state.home is not None or state.parking:
      base, origin = await engine.scheduler.run(state, None), None
    return [Context(engine, state.fork(base, origin)) for _ in range(count)]

  def close(self) -> None:
    """Frees the slot; may be called twice. A call under way ends in EngineError."""
    state, scheduler = self.state, self._engine.scheduler
    if self._engine.config.prefix_reuse == "turns" and state.job is None and state.lost is None:
      scheduler.remember(state)
    scheduler.drop(state, "it was closed")


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
    policies: how many share its slots, with adapters of their own over one base (``lora.adapt``);
      this is the first of them, and ``others`` are the rest.

  Attributes:
    others: engines like this one, each for another policy.
  """

  def __init__(
    self,
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    decode: Decode | None = None,
    vocab_limit: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    policies: int = 1,
  ) -> None:
    self.decode = decode
    self.scheduler = Scheduler(model_config, config, vocab_limit, devices, policies)
    self.model_config, self.config = self.scheduler.model_config, self.scheduler.config
    self._policy = 0
    self.others: tuple[Engine, ...] = ()
    for policy in range(1, policies):
      other = copy.copy(self)
      other._policy, other.others = policy, ()
      self.others += (other,)

  @property
  def stats(self) -> EngineStats:
    """Totals since the engine was made."""
    return self.scheduler.stats

  @property
  def stored_bytes(self) -> tuple[int, int]:
    """Bytes stored outside the slots, on the device and on the host."""
    store = self.scheduler.store
    return store.on_device, store.on_host

  @property
  def waiting(self) -> int:
    """Calls that wait for a slot: the pressure on the engine."""
    return self.scheduler.waiting

  @property
  def version(self) -> int:
    """Version of the weights in use; -1 before the first ``publish``."""
    return self.scheduler.version(self._policy)

  @property
  def max_tokens(self) -> int:
    """That a context can hold: ``max_length``, or less where a lane has fewer pages."""
    return self.scheduler.max_tokens

  def places(self, tokens: int) -> int:
    """That a run of tokens takes of ``max_tokens`` if its pages hold nothing else."""
    programs = self.scheduler.lanes[0].slots.programs
    return programs.pages_of(tokens) * programs.block_tokens if programs.has_blocks else tokens

  def publish(self, params: Params, version: int) -> None:
    """Takes a copy of new training parameters, from the next dispatch on.

    They may be sharded; where they span processes, all processes must call this together.
    Every token carries the version it was sampled with. A prefix of other weights is run again
    where it is opened; a context that has sampled keeps what it has in its cache.

    Any thread may call this while programs sample, one call at a time: a cycle takes the weights
    once, when it is planned, and its tokens carry their version.
    """
    self.scheduler.publish(params, version, self._policy)

  async def release_weights(self) -> None:
    """Frees the memory of the weights, once no call is under way, until the next ``publish``.

    For devices that train and sample in turn. Contexts keep what they hold.
    """
    await self.scheduler.release_weights()

  def keys(self, token_ids: Sequence[int] | np.ndarray, images: Images) -> np.ndarray:
    """What tells tokens and their images apart, see ``Context.extend``.

    Raises:
      ImageError: the model has no vision tower.
    """
    ids = token_array(token_ids, self.model_config.vocab_size)
    stream = stream_kind(self.model_config)
    if images and not (stream is not None and stream.sees_images):
      raise ImageError(
        f"{len(images)} images were given, the first at token {images[0][0]}, and the model "
        f"(model.pattern={self.model_config.pattern!r}) has no vision tower; allowed: images=(), "
        "or a model whose blocks see images (models.StreamKind.sees_images)."
      )
    return self.scheduler.image_keys.of(ids, images)

  async def prefill(
    self,
    token_ids: Sequence[int] | np.ndarray,
    *,
    priority: tuple[int, ...] = (),
    images: Images = (),
  ) -> Prefix:
    """Runs a prompt once, for any number of contexts; ``images`` as in ``Context.extend``.

    Raises:
      ContextLengthError: it is longer than a context can be.
      ImageError: the model has no vision tower.
    """
    context = await self.open_ids(token_ids, priority=priority, images=images)
    state = context.state
    ids = state.pending[0].ids
    try:
      snapshot = await self.scheduler.run(state, None)
    finally:
      self.scheduler.drop(state, "it was a prefill")
    assert snapshot is not None
    return Prefix(snapshot, ids, state.experts.array(), self._policy)

  async def open(self, prefix: Prefix, *, priority: tuple[int, ...] = ()) -> Context:
    """A context that begins with ``prefix``. Lower priority tuples get slots first."""
    if prefix.snapshot is None:
      raise EngineError("the prefix was released.")
    if prefix.policy != self._policy:
      raise EngineError(
        "the prefix is of another policy; allowed: open it by that policy's engine."
      )
    state = ContextState(priority, self._policy)
    state.begin_with(prefix.snapshot, prefix.ids, prefix.experts)
    return Context(self, state)

  async def open_ids(
    self,
    token_ids: Sequence[int] | np.ndarray,
    *,
    priority: tuple[int, ...] = (),
    images: Images = (),
  ) -> Context:
    """A context that begins with ``token_ids``; they run with its first ``generate``.

    ``images`` as in ``Context.extend``.
    """
    context = self.empty(priority=priority)
    await context.extend(token_ids, images=images)
    return context

  def empty(self, *, priority: tuple[int, ...] = ()) -> Context:
    """A context that holds nothing yet; it has to be extended before it samples."""
    return Context(self, ContextState(priority, self._policy))

  def keep_piece(self, piece: Piece, version: int) -> HeldPiece:
    """A run of tokens that was taken in by itself, in pages that contexts may begin with.

    Args:
      piece: from ``models.pieces.run_piece``, with this policy's weights of ``version``.
      version: of these weights; pieces of others than those in use are refused where they are
        opened.
    """
    self.check_pieces()
    return self.scheduler.lanes[0].slots.keep_piece(piece, version)

  async def open_pieces(
    self, pieces: Sequence[HeldPiece], *, priority: tuple[int, ...] = ()
  ) -> Context:
    """A context that begins with pieces, see ``Context.append_pieces``.

    ``fork`` one for a group, which then shares the states as well.
    """
    context = self.empty(priority=priority)
    await context.append_pieces(pieces)
    return context

  def check_pieces(self) -> None:
    """Raises EngineError unless contexts may have pieces."""
    if not self.config.pieces or self.others or self._policy:
      raise EngineError(
        f"engine.pieces={self.config.pieces} with {1 + len(self.others)} policies; allowed for "
        "pieces: engine.pieces=True and one policy."
      )

  def executables(self) -> tuple[str, ...]:
    """Names of all compiled programs."""
    return self.scheduler.lanes[0].slots.executables()

  def close(self) -> None:
    """Ends the threads, of all policies that share them. Calls under way fail."""
    self.scheduler.close()
