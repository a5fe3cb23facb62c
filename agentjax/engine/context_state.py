"""State of a context: what it holds, where it is, and all changes to both."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from agentjax.engine.request import EngineError
from agentjax.engine.store import Snapshot
from agentjax.models.pieces import Layout

if TYPE_CHECKING:
  from agentjax.engine.lane import Job, Lane


@dataclasses.dataclass(frozen=True)
class Run:
  """Ids that a context still has to take in, by extension or through the decode step.

  With images, ids are ``ImageKeys``, here and wherever a context records ids.
  """

  kind: Literal["extend", "force"]
  ids: np.ndarray


class Ledger:
  """One entry for every token of a context, in the parts in which they came."""

  def __init__(self, parts: Sequence[np.ndarray] = ()) -> None:
    self.parts = list(parts)
    self._length = sum(map(len, self.parts))

  def array(self) -> np.ndarray | None:
    """All entries; None if there are none."""
    return np.concatenate(self.parts) if self.parts else None

  def record(self, start: int, part: np.ndarray) -> None:
    """Records the entries from ``start`` on; those recorded there before are dropped."""
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


class ContextState:
  """One context as lanes and scheduler see it. Only the event loop changes it.

  It is in a slot (``home``), is being read out of one (``parking``), or is a snapshot (``base``).
  Once ``lost`` gives a reason, it cannot be used again.

  Attributes:
    priority: of the contexts that wait, the one with the lowest gets a slot first.
    policy: number of the policy that it is a conversation with.
    held: tokens in the slot, or in ``base``.
    layout: where the pages of its pieces stand, if it begins with any.
    pending: runs of ids that it still has to take in.
    base: its content without a slot; None is an empty context.
    origin: the ids of ``base``, if that is a bare prefix.
    home: its slot.
    parking: it is being read out of its slot; ``base`` is not set yet.
    job: its call under way.
    lost: why it cannot be used; None while it can.
    version: of the weights that computed the held tokens; -1 if several did.
    newest: of the weights that computed the logits of the next token.
    first_run: the run of ids that it takes in from its start; None once it holds more.
    last_boundary: place in ``first_run`` where the context was last kept.
    ids: of the held tokens, for the reuse of closed contexts.
    experts: of the held tokens, if they are recorded.
  """

  def __init__(self, priority: tuple[int, ...], policy: int = 0) -> None:
    self.priority, self.policy = priority, policy
    self.held = 0
    self.layout: Layout | None = None
    self._joined = 0  # tokens of its pieces
    self.pending: collections.deque[Run] = collections.deque()
    self.base: Snapshot | None = None
    self.origin: np.ndarray | None = None
    self.home: tuple[Lane, int] | None = None
    self.parking = False
    self.job: Job | None = None
    self.lost: str | None = None
    self.version = self.newest = -1
    self.first_run: np.ndarray | None = None
    self.last_boundary = 0
    self.ids, self.experts = Ledger(), Ledger()

  def __len__(self) -> int:
    """Tokens of the context, those not yet run through the model included."""
    return self.held + sum(len(run.ids) for run in self.pending)

  @property
  def gap(self) -> int:
    """By how many places its next token stands behind its position."""
    return 0 if self.layout is None else self.layout.gap

  @property
  def places(self) -> int:
    """Places of its pages up to its last token in the slot, or in ``base``."""
    return self.held + self.gap

  @property
  def is_bare(self) -> bool:
    """Whether it has pieces and nothing behind them, so that no logits are known."""
    return self.layout is not None and len(self) == self._joined

  @property
  def extends_next(self) -> bool:
    """Whether what it takes in next runs by extension."""
    return bool(self.pending) and self.pending[0].kind == "extend"

  def check_usable(self) -> None:
    """Raises EngineError if it is lost or another call is under way."""
    if self.lost is not None:
      raise EngineError(f"the context cannot be used: {self.lost}.")
    if self.job is not None:
      raise EngineError("the context is busy: await its call before the next.")

  # Beginnings.

  def begin_at(self, base: Snapshot | None) -> None:
    """Takes length and version from a snapshot."""
    self.held = 0 if base is None else base.length
    self.version = self.newest = -1 if base is None else base.version

  def begin_with(self, prefix: Snapshot, ids: np.ndarray, experts: np.ndarray | None) -> None:
    """Starts as the bare prefix of ``ids``."""
    self.base, self.origin = prefix, ids
    self.begin_at(prefix)
    self._note_known(ids, experts)

  def begin_with_pieces(self, base: Snapshot) -> None:
    """Starts as pieces in a row. Which ids they hold is not known here."""
    self.base, self.layout, self._joined = base, base.layout, base.length
    self.begin_at(base)
    self.ids = Ledger([np.full(base.length, -1)])

  def begin_again(self) -> None:
    """Queues the ids of its bare prefix again, as older weights computed it."""
    assert self.origin is not None
    self.pending.appendleft(Run("extend", self.origin))
    self.begin_at(None)

  def begin_known(self, base: Snapshot, experts: np.ndarray | None, *, shares_more: bool) -> None:
    """Takes the beginning of its first run from ``base``.

    ``shares_more``: what it takes in next may be kept for others too.
    """
    run, tokens = self.pending.popleft(), base.length
    if tokens < len(run.ids):
      self.pending.appendleft(Run("extend", run.ids[tokens:]))
    if not shares_more:
      self.first_run = None
    self.begin_at(base)
    self.last_boundary = tokens
    self._note_known(run.ids[:tokens], experts)

  def _note_known(self, ids: np.ndarray, experts: np.ndarray | None) -> None:
    self.ids = Ledger([ids])
    self.experts = Ledger([] if experts is None else [experts])

  def fork(self, base: Snapshot | None, origin: np.ndarray | None) -> ContextState:
    """Another context that continues from here, without a slot."""
    twin = ContextState(self.priority, self.policy)
    twin.base, twin.origin, twin.held = base, origin, self.held
    twin.layout, twin._joined = self.layout, self._joined
    twin.version, twin.newest = self.version, self.newest
    twin.ids, twin.experts = Ledger(self.ids.parts), Ledger(self.experts.parts)
    return twin

  # What the model takes in.

  def add(self, ids: np.ndarray) -> None:
    """Appends ids, not yet run through the model."""
    self.pending.append(Run("extend", ids))

  def next_piece(self, largest: int) -> np.ndarray:
    """The ids of the next extension; a run is cut into pieces of ``largest``."""
    run = self.pending.popleft()
    if len(run.ids) > largest:
      self.pending.appendleft(Run("extend", run.ids[largest:]))
    return run.ids[:largest]

  def take(self, ids: np.ndarray, version: int) -> None:
    """Counts ids that the model takes in with weights of ``version``."""
    self.ids.record(self.held, ids)
    self.version = version if self.held == 0 or self.version == version else -1
    self.newest = version
    self.held += len(ids)

  def take_decoded(self, ids: np.ndarray, experts: np.ndarray | None, version: int) -> None:
    """Counts decoded ids, and records what routers chose for them."""
    if experts is not None:
      self.experts.record(self.held, experts)
    self.first_run = None
    self.take(ids, version)

  # Moves.

  def placed(self) -> None:
    """Notes that its slot holds its content."""
    self.base = self.origin = None

  def leave(self) -> None:
    """Gives its slot to others; the slot is read first."""
    self.home, self.parking = None, True

  def make_way(self) -> None:
    """Gives its pages to others after they are read; it keeps its slot."""
    self.parking = True

  def parked(self, snapshot: Snapshot) -> None:
    """Notes that it was read out of its slot."""
    self.parking = False
    if self.lost is None:
      self.base = dataclasses.replace(snapshot, version=self.version)

  def rewind(self, base: Snapshot, kept: np.ndarray) -> None:
    """Goes back to the start of its call, without a slot; the kept tokens are fed again."""
    self.base, self.home = base, None
    self.begin_at(base)
    self.pending.append(Run("force", kept))

  def lose(self, why: str) -> None:
    """Makes it unusable and drops what it holds outside its slot."""
    self.lost = why
    self.base = None
    self.pending.clear()
