"""Immutable pieces of contexts, shared or without a slot, and where they are kept."""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from agentjax.models.pieces import Layout

if TYPE_CHECKING:
  from agentjax.engine.pages import Pages


@dataclasses.dataclass
class _Residence:
  on_host: bool
  nbytes: int


class Stored:
  """An immutable piece, shared by all that need it; the last to let go frees it.

  Attributes:
    arrays: its content outside of pages; None if only pages hold it.
    pages: its page in each pool that has it.
  """

  __slots__ = ("__weakref__", "arrays", "pages", "residence")

  def __init__(self) -> None:
    self.arrays: tuple[Any, ...] | None = None
    self.pages: dict[Pages, int] = {}
    self.residence = _Residence(on_host=False, nbytes=0)


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """One context outside the slots: all it needs to go on in any slot, to the bit.

  Attributes:
    state: recurrent states, convolution tails, logits, the length.
    blocks: keys and values, ``EngineConfig.block_tokens`` tokens each, by ``Programs.layers``. They
      end with the context, and begin with its first token or the first that a window still needs;
      the last one may be filled in part.
    length: tokens.
    version: of the weights that computed all of it; -1 if several did.
    layout: where its pages stand, if it begins with pieces.
  """

  state: Stored
  blocks: tuple[tuple[Stored, ...], ...]
  length: int
  version: int
  layout: Layout | None = None

  @property
  def places(self) -> int:
    """Places of its pages up to its last token."""
    return self.length + (0 if self.layout is None else self.layout.gap)

  @property
  def stored(self) -> tuple[Stored, ...]:
    """All blocks."""
    return tuple(block for blocks in self.blocks for block in blocks)


@dataclasses.dataclass(frozen=True)
class HeldPiece:
  """A run of tokens that was taken in by itself, for any number of contexts to begin with.

  Attributes:
    blocks: its keys and values from position 0 on, in pages of its own.
    states: what else its layers keep, see ``models.pieces.states``.
    length: tokens.
    version: of the weights that computed it.
  """

  blocks: tuple[Stored, ...]
  states: tuple[Any, ...]
  length: int
  version: int


class Store:
  """Counts what is stored outside of pages, and moves pieces from the device to the host.

  Every piece counts once, however many contexts share it, as long as anyone holds it.

  Args:
    device_bytes: most bytes on the device; beyond them the longest unused go to the host.
    host_bytes: most bytes on the host.

  Attributes:
    fetch: gives the content of arrays of the device to the host.
  """

  def __init__(self, device_bytes: int, host_bytes: int) -> None:
    self.device_bytes, self.host_bytes = device_bytes, host_bytes
    self.fetch: Callable[[Sequence[Any]], Sequence[np.ndarray]] = jax.device_get
    self._lock = threading.RLock()  # a finaliser may run in the middle of anything
    self._used = {False: 0, True: 0}  # by on_host
    # What is on the device, the longest unused first.
    self._recent: collections.OrderedDict[int, weakref.ref[Stored]] = collections.OrderedDict()

  @property
  def on_device(self) -> int:
    """Bytes stored on the device."""
    return self._used[False]

  @property
  def on_host(self) -> int:
    """Bytes stored on the host."""
    return self._used[True]

  def room_for(self, nbytes: int) -> bool:
    """Whether ``nbytes`` more fit in both budgets together."""
    return self.on_device + self.on_host + nbytes <= self.device_bytes + self.host_bytes

  def add(
    self, arrays: Sequence[jax.Array | np.ndarray] | None, *, on_host: bool = False
  ) -> Stored:
    """Keeps arrays of a device, or of the host; None: only a page holds the piece."""
    stored = Stored()
    forget = weakref.finalize(stored, self._forget, id(stored), stored.pages, stored.residence)
    forget.atexit = False
    stored.residence.on_host = on_host
    if arrays is not None:
      self.fill(stored, arrays)
    return stored

  def fill(self, stored: Stored, arrays: Sequence[jax.Array | np.ndarray]) -> None:
    """Keeps arrays of a piece that only pages held; a second lane's copy is ignored."""
    nbytes = sum(v.nbytes for v in arrays)
    with self._lock:
      if stored.arrays is not None:
        return
      stored.arrays = tuple(arrays)
      stored.residence.nbytes = nbytes
      self._used[stored.residence.on_host] += nbytes
      if not stored.residence.on_host:
        self._recent[id(stored)] = weakref.ref(stored)

  def touch(self, snapshot: Snapshot) -> None:
    """Notes that a context was used."""
    with self._lock:
      for stored in (snapshot.state, *snapshot.stored):
        if id(stored) in self._recent:
          self._recent.move_to_end(id(stored))

  def relieve_device(self) -> None:
    """Moves the longest unused pieces to the host until the device's budget is kept."""
    while self.on_device > self.device_bytes:
      with self._lock:
        if not self._recent:
          return
        _, reference = self._recent.popitem(last=False)
      stored = reference()
      if stored is None:
        continue
      # Assigned at once: a reader sees the arrays of the device or those of the host.
      stored.arrays = tuple(np.asarray(v) for v in self.fetch(stored.arrays or ()))
      with self._lock:
        stored.residence.on_host = True
        self._used[False] -= stored.residence.nbytes
        self._used[True] += stored.residence.nbytes

  def _forget(self, identity: int, pages: dict[Pages, int], residence: _Residence) -> None:
    for lane, page in pages.items():
      lane.forget(page)
    with self._lock:
      self._used[residence.on_host] -= residence.nbytes
      self._recent.pop(identity, None)
