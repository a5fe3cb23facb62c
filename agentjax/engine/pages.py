"""Host-side record of which slot or stored piece has which page of keys and values."""

from __future__ import annotations

import collections
import weakref

from agentjax.engine.store import Stored


class Pages:
  """Pages of one way of a lane (see ``Programs``): free, a slot's own, or of a stored piece.

  A stored piece that no slot holds may lose its page once it is kept elsewhere, the longest unused
  first. One thread at a time uses this, except for ``wanted`` and ``forget``.

  Args:
    first: the first page, which no slot gets.
    count: pages, that one included.

  Attributes:
    empty: that first page; it holds zeros.
    wanted: pieces that other lanes need a copy of.
  """

  def __init__(self, first: int, count: int) -> None:
    self.empty = first
    self.wanted: list[Stored] = []
    self._free = list(range(first + count - 1, first, -1))
    self._holders: collections.Counter[int] = collections.Counter()  # slots, by page
    # What no slot holds, the longest unused first.
    self._loose: collections.OrderedDict[int, weakref.ref[Stored]] = collections.OrderedDict()
    self._over: collections.deque[int] = collections.deque()  # of pieces that are gone

  @property
  def available(self) -> int:
    """Pages that are free, or become so by moving what they hold."""
    self._collect()
    return len(self._free) + len(self._loose)

  @property
  def free(self) -> int:
    """Pages that hold nothing."""
    self._collect()
    return len(self._free)

  def take(self) -> int | None:
    """A page for one slot alone; None if none is free."""
    self._collect()
    return self._free.pop() if self._free else None

  def give(self, page: int) -> None:
    """Takes a slot's own page back."""
    self._free.append(page)

  def store(self, stored: Stored, page: int) -> None:
    """Makes a taken page that of ``stored``, held by no slot."""
    stored.pages[self] = page
    self._loose[page] = weakref.ref(stored)

  def hold(self, stored: Stored) -> int:
    """Counts one slot more that holds it; returns its page."""
    page = stored.pages[self]
    self._holders[page] += 1
    self._loose.pop(page, None)
    return page

  def loosen(self, stored: Stored) -> None:
    """Counts one slot less that holds it."""
    page = stored.pages[self]
    self._holders[page] -= 1
    if not self._holders[page]:
      del self._holders[page]
      self._loose[page] = weakref.ref(stored)

  def holders(self, stored: Stored) -> int:
    """Slots that hold it."""
    page = stored.pages.get(self)
    return 0 if page is None else self._holders[page]

  def longest_unused(self, count: int) -> list[Stored]:
    """Pieces that no slot holds, the longest unused first."""
    found: list[Stored] = []
    for reference in self._loose.values():
      stored = reference()
      if stored is not None:
        found.append(stored)
      if len(found) == count:
        break
    return found

  def release(self, stored: Stored) -> None:
    """Frees the page of a piece that no slot holds and that is kept elsewhere."""
    page = stored.pages.pop(self)
    del self._loose[page]
    self._free.append(page)

  def forget(self, page: int) -> None:
    """Marks the page of a piece that is gone; any thread may call this."""
    self._over.append(page)

  def _collect(self) -> None:
    while self._over:
      page = self._over.popleft()
      self._loose.pop(page, None)
      self._free.append(page)
