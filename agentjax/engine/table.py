"""Which pages of layers that look equally far back the slots of a lane have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentjax.engine.pages import Pages
from agentjax.engine.store import Stored

if TYPE_CHECKING:
  from agentjax.engine.programs import PagedLayers


class Table:
  """The pages of every slot, by their place in its context.

  A slot has the pages from ``first[slot]`` to ``end(slot)``. Those before were given back: no later
  token reads them. The first of the others are stored and may be shared with others; the rest,
  which still change, are its own.

  Args:
    layers: whose pages.
    entries: int32 [slots, entries], to be filled in: what the programs read. Where a slot has no
      page, it is the empty one of its way.
    ways: see ``Programs``.

  Attributes:
    pools: the pages of each way.
    first: by slot, the place of the first page it has.
    shared, own: by slot, its pages, the first before the last.
  """

  def __init__(self, layers: PagedLayers, entries: np.ndarray, ways: int) -> None:
    slots = len(entries)
    self.layers, self.entries = layers, entries
    self.pools = [Pages(way * layers.pages, layers.pages) for way in range(ways)]
    self.first = [0] * slots
    self.shared: list[list[Stored]] = [[] for _ in range(slots)]
    self.own: list[list[int]] = [[] for _ in range(slots)]
    for slot in range(slots):
      entries[slot] = self.pool(slot).empty

  def pool(self, slot: int) -> Pages:
    """The pages that a slot takes from."""
    return self.pools[slot * len(self.pools) // len(self.entries)]

  def end(self, slot: int) -> int:
    """The place behind the last page of a slot."""
    return self.first[slot] + len(self.shared[slot]) + len(self.own[slot])

  def page(self, block: Stored) -> int | None:
    """A page that holds a stored piece, or None."""
    return next((p for p in map(block.pages.get, self.pools) if p is not None), None)

  def append(self, slot: int, page: int) -> None:
    """Gives a slot one more page of its own."""
    self.entries[slot, self.end(slot)] = page
    self.own[slot].append(page)

  def share(self, slot: int, first: int, blocks: list[Stored]) -> None:
    """Gives a slot without pages stored ones that it holds, from place ``first`` on."""
    pool = self.pool(slot)
    self.first[slot], self.shared[slot] = first, blocks
    self.entries[slot, first : first + len(blocks)] = [block.pages[pool] for block in blocks]

  def pass_by(self, slot: int, tokens: int) -> None:
    """Gives back the pages that are not needed any more where a slot holds so many tokens."""
    pool, shared, own = self.pool(slot), self.shared[slot], self.own[slot]
    begin, end = self.first[slot], min(self.layers.passed(tokens), self.end(slot))
    for _ in range(begin, end):
      if shared:
        pool.loosen(shared.pop(0))
      else:
        pool.give(own.pop(0))
    if end > begin:
      self.entries[slot, begin:end] = pool.empty
      self.first[slot] = end

  def release(self, slot: int) -> None:
    """Gives all pages of a slot back."""
    pool = self.pool(slot)
    for block in self.shared[slot]:
      pool.loosen(block)
    for page in self.own[slot]:
      pool.give(page)
    self.first[slot], self.shared[slot], self.own[slot] = 0, [], []
    self.entries[slot] = pool.empty
