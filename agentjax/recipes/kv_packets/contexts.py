"""Contexts that read known documents as packets, wherever these stand in a conversation.

``PacketEngine`` stands before an engine and is used in its place. Where a prompt, a tool result or
any other text holds the ids of a document of its ``Library``, the context takes in the packet of
that document instead of computing it. The record stays the plain conversation: its ids are those of
the text, and three columns say which packet stood where. Training computes every token in full, or
reads the packets where the columns say (``scores``); ``mismatch/*`` of a run shows how far that is
from what was sampled.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentjax.engine.engine import Context, Engine, Prefix
from agentjax.engine.prefix_cache import Images
from agentjax.engine.publish import Weights
from agentjax.engine.request import ContextLengthError, EngineError, Sample, SampleRequest
from agentjax.engine.store import HeldPiece
from agentjax.models import DecodeParams, Params
from agentjax.recipes.kv_packets.adapter import Adapter
from agentjax.recipes.kv_packets.library import Library
from agentjax.recipes.kv_packets.packet import PacketKey, PacketMaker
from agentjax.recipes.kv_packets.store import PacketStore
from agentjax.trajectory.columns import Column, register_column

PACKETS = register_column(
  Column(
    "packets",
    "uint32",
    "First 64 bits of the name of the packet that stood for the token; 0 for none.",
    shape=(2,),
    in_loss=False,
  )
)
PACKET_VERSIONS = register_column(
  Column(
    "packet_versions",
    "int32",
    "Version of the weights that computed the packet; -1 without one.",
    fill=-1,
    in_loss=False,
  )
)
PACKET_PLACES = register_column(
  Column(
    "packet_places",
    "int32",
    "Place of the token in the document of its packet; -1 without one.",
    fill=-1,
    in_loss=False,
  )
)


class PacketEngine:
  """An engine whose contexts read the documents of a library as packets.

  It has what ``Engine`` has; what is not here is the engine's own.

  Args:
    engine: with ``pieces=True``, of one policy.
    library: documents; more may be added at any time.
    store: of packets.
    adapter: around every document; None is neither header nor trailer.
    recompute: read documents as text, and compute them in full.
    text_length: tokens of text that each context must be able to hold, whatever it reads: packets
      take more room than their text, and one that would leave too little is read as text. None:
      only what the packet itself needs is looked at.

  Attributes:
    library: as given; an empty one with ``recompute``.
    saved_tokens: tokens of documents that contexts did not compute.
  """

  def __init__(
    self,
    engine: Engine,
    library: Library,
    store: PacketStore,
    adapter: Adapter | None = None,
    *,
    recompute: bool = False,
    text_length: int | None = None,
  ) -> None:
    self.text_length = text_length
    self._engine, self._store, self._adapter = engine, store, adapter
    self.library = Library() if recompute else library
    self._maker: tuple[Weights, PacketMaker] | None = None
    # In pages, by number, the longest unread first; only the thread of the lane uses them.
    self._held: collections.OrderedDict[int, tuple[HeldPiece, PacketKey, int]]
    self._held, self._held_bytes = collections.OrderedDict(), 0
    self.saved_tokens = 0

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  @property
  def max_tokens(self) -> int:
    """Tokens of text that a context can hold."""
    return self.places_of_context if self.text_length is None else self.text_length

  @property
  def places_of_context(self) -> int:
    """Places that a context has, for text, headers, trailers and what pages leave free."""
    return self._engine.max_tokens

  def publish(self, params: Params, version: int) -> None:
    """As of an engine; packets of other weights are no longer used."""
    self._engine.publish(params, version)
    self._maker = None

  async def release_weights(self) -> None:
    """As of an engine."""
    await self._engine.release_weights()
    self._maker = None

  async def packet(self, number: int) -> tuple[HeldPiece, PacketKey]:
    """That of a document of the library, of the weights in use; made where it was not yet.

    Packets in pages take as many bytes at most as the store may; one is kept whatever its size, and
    those that contexts hold stay as long as these.
    """
    return await self._engine.scheduler.in_lane(lambda weights: self._read(weights, number))

  def _read(self, weights: Weights, number: int) -> tuple[HeldPiece, PacketKey]:
    known = self._maker
    if known is None or known[0] is not weights:
      assert isinstance(weights.params, DecodeParams), "one policy, see ``Engine.check_pieces``"
      known = weights, PacketMaker(weights.params, self._engine.model_config, self._adapter)
      self._store.drop_others(known[1])
      self._held.clear()
      self._held_bytes, self._maker = 0, known
    if number not in self._held:
      packet = self._store.get(known[1], self.library.documents[number])
      piece = self._engine.keep_piece(packet.piece, weights.versions[0])
      self._held[number] = piece, packet.key, packet.nbytes
      self._held_bytes += packet.nbytes
      while self._held_bytes > self._store.memory_bytes and len(self._held) > 1:
        self._held_bytes -= self._held.popitem(last=False)[1][2]
    self._held.move_to_end(number)
    return self._held[number][:2]

  async def open_ids(
    self,
    token_ids: Sequence[int] | np.ndarray,
    *,
    priority: tuple[int, ...] = (),
    images: Images = (),
  ) -> PacketContext:
    """A context that begins with ``token_ids``, documents among them as packets."""
    context = PacketContext(self, self._engine.empty(priority=priority))
    try:
      await context.extend(token_ids, images=images)
    except BaseException:
      context.close()
      raise
    return context

  async def prefill(
    self,
    token_ids: Sequence[int] | np.ndarray,
    *,
    priority: tuple[int, ...] = (),
    images: Images = (),
  ) -> Prefix | PacketPrefix:
    """As of an engine."""
    if all(number is None for _, number in self.library.split(token_ids)):
      return await self._engine.prefill(token_ids, priority=priority, images=images)
    context = await self.open_ids(token_ids, priority=priority, images=images)
    try:
      (prefix,) = await context.fork(1)
    finally:
      context.close()
    return PacketPrefix(prefix)

  async def open(
    self, prefix: Prefix | PacketPrefix, *, priority: tuple[int, ...] = ()
  ) -> PacketContext:
    """As of an engine."""
    if isinstance(prefix, Prefix):
      return PacketContext(self, await self._engine.open(prefix, priority=priority))
    (context,) = await prefix.context.fork(1)
    context.state.priority = priority
    return context


class PacketPrefix:
  """A prompt with packets that was run once; see ``engine.Prefix``."""

  def __init__(self, context: PacketContext) -> None:
    self.context = context

  def __len__(self) -> int:
    return len(self.context)

  def release(self) -> None:
    """Lets go of its memory."""
    self.context.close()


class PacketContext:
  """A context of a ``PacketEngine``; its length and its columns are those of the text."""

  def __init__(self, engine: PacketEngine, context: Context) -> None:
    self._engine, self._context = engine, context
    self._around = 0  # tokens of headers and trailers
    self._last: int | None = None  # a document that the text ends with, not yet taken in
    self._read: list[tuple[int, int, PacketKey, int]] = []  # place, tokens, key, version

  def __getattr__(self, name: str) -> Any:
    return getattr(self._context, name)

  def __len__(self) -> int:
    """Tokens of the text."""
    return len(self._context) - self._around + self._waiting

  @property
  def _waiting(self) -> int:
    return 0 if self._last is None else len(self._engine.library.documents[self._last])

  @property
  def room(self) -> int:
    """Tokens of text it can still take."""
    return min(self._context.room - self._waiting, self._engine.max_tokens - len(self))

  async def extend(self, token_ids: Sequence[int] | np.ndarray, *, images: Images = ()) -> None:
    """As of a context; without ``text_length`` what does not fit may be taken in up to there.

    A document is read as a packet once something follows it, as nothing is known of what comes
    next behind packets alone.
    """
    limit = self._engine.text_length
    if limit is not None and len(self) + len(token_ids) > limit:
      raise ContextLengthError(
        f"a context of {len(self)} tokens cannot take {len(token_ids)} more; allowed: {limit} "
        "tokens of text in all."
      )
    parts = [(token_ids, None)] if images else self._engine.library.split(token_ids)
    for ids, number in parts:
      await self._take_last(as_packet=True)
      if number is None:
        await self._context.extend(ids, images=images)
      else:
        self._last = number

  async def _take_last(self, *, as_packet: bool) -> None:
    """Takes in the document that the text ends with."""
    if self._last is None:
      return
    ids, place = self._engine.library.documents[self._last], len(self) - self._waiting
    while as_packet:
      piece, key = await self._engine.packet(self._last)
      if not self._fits(piece):
        break
      try:
        await self._context.append_pieces([piece])
      except EngineError:
        if piece.version == self._engine.version:
          raise
        continue  # new weights were published on the way
      self._read.append((place, len(ids), key, piece.version))
      self._around += piece.length - len(ids)
      self._engine.saved_tokens += len(ids)
      self._last = None
      return
    await self._context.extend(ids)
    self._last = None

  def _fits(self, piece: HeldPiece) -> bool:
    """Whether text and packet leave the room that is asked for."""
    engine, state = self._engine, self._context.state
    taken = engine.places(len(state) + state.gap) + engine.places(piece.length)
    follows = 0 if engine.text_length is None else engine.text_length - len(self)
    return taken + max(follows, 1) <= engine.places_of_context

  async def generate(self, request: SampleRequest) -> Sample:
    """As of a context."""
    await self._take_last(as_packet=False)
    return await self._context.generate(request)

  async def fork(self, count: int) -> list[PacketContext]:
    """As of a context."""
    made = [PacketContext(self._engine, context) for context in await self._context.fork(count)]
    for twin in made:
      twin._around, twin._read, twin._last = self._around, list(self._read), self._last
    return made

  @property
  def columns(self) -> dict[str, np.ndarray]:
    """As of a context, and which packets stood where, if there were any."""
    columns = dict(self._context.columns)
    if self._read:
      columns |= {c.name: c.filled([len(self)]) for c in (PACKETS, PACKET_VERSIONS, PACKET_PLACES)}
      for place, tokens, key, version in self._read:
        own = slice(place, place + tokens)
        columns[PACKETS.name][own] = np.frombuffer(bytes.fromhex(key.name)[:8], ">u4")
        columns[PACKET_VERSIONS.name][own] = version
        columns[PACKET_PLACES.name][own] = np.arange(tokens)
    return columns
