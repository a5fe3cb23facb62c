"""Contexts that were computed before: a radix tree over token ids and their images."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agentjax.engine.store import Snapshot

Images = Sequence[tuple[int, str]]  # place of the first token of an image, hash of its content

_TOKEN_BITS = 32


class ImageKeys:
  """Keys of tokens, equal if the token and the image that begins there are equal.

  A key is the token's id, with the number of the image in the bits above it: n for the n-th image
  content seen, 0 for a token without an image. So no two images share a key.
  """

  def __init__(self) -> None:
    self._numbers: dict[str, int] = {}

  def of(self, ids: np.ndarray, images: Images) -> np.ndarray:
    """Keys of a run of ids; without images they are the ids.

    Raises:
      ValueError: a place outside the run, or two images at one place.
    """
    if not images:
      return ids
    places = [place for place, _ in images]
    if len(set(places)) < len(places) or not all(0 <= place < len(ids) for place in places):
      raise ValueError(
        f"images at the places {places} of {len(ids)} tokens; allowed: places of 0 to "
        f"{len(ids) - 1}, each once."
      )
    keys = ids.astype(np.int64)
    for place, content in images:
      number = self._numbers.setdefault(content, len(self._numbers) + 1)
      keys[place] += number << _TOKEN_BITS
    return keys


def token_ids(keys: np.ndarray) -> np.ndarray:
  """int32 ids of keys."""
  return (keys & ((1 << _TOKEN_BITS) - 1)).astype(np.int32) if keys.dtype == np.int64 else keys


@dataclasses.dataclass(eq=False)
class Entry:
  """A context that is kept at a boundary of the tree.

  Attributes:
    snapshot: the context up to there.
    experts: what its routers chose, if recorded: [tokens, routers, choices].
    fresh: its tokens were taken in as one run from an empty context, so that another context that
      takes in the same run computes the same bits.
  """

  snapshot: Snapshot
  experts: np.ndarray | None
  fresh: bool


class _Node:
  __slots__ = ("children", "edge", "entry", "parent")

  def __init__(self, edge: np.ndarray, parent: _Node | None) -> None:
    self.edge = edge  # keys from the parent to here
    self.parent = parent
    self.children: dict[int, _Node] = {}  # by the first key of their edges
    self.entry: Entry | None = None


class PrefixCache:
  """Longest known beginning of a run of ids, for one version of the weights.

  With images, ids are ``ImageKeys``: all runs share what comes before an image; only runs with the
  same image share the rest.

  Keys and values can be cut anywhere, recurrent states cannot. So an entry serves the runs that
  begin with all its ids; where ``may_cut`` says so, a part of an entry serves as well.

  Args:
    grid: tokens of the largest extension. A run is cut into pieces of this size from its start. So
      at a multiple of ``grid`` a fresh context has the same bits for all runs that agree so far;
      anywhere else the bits are those of one length alone.
    any_history: entries of any boundary and history serve. Values are then equal up to rounding and
      not to the bit.
    may_cut: whether the first so many tokens of a context can be had from it, see ``SlotEngine``;
      None is never.
  """

  def __init__(
    self, grid: int, *, any_history: bool, may_cut: Callable[[Snapshot, int], bool] | None
  ) -> None:
    self._grid, self._any_history, self._may_cut = grid, any_history, may_cut
    self._root = _Node(np.zeros(0, np.int32), None)
    self._recent: collections.OrderedDict[Entry, _Node] = collections.OrderedDict()
    self.version = -1

  def __len__(self) -> int:
    return len(self._recent)

  def clear(self, version: int) -> None:
    """Forgets everything; from here on contexts of ``version`` are kept."""
    for node in self._recent.values():
      node.entry = None  # nodes form cycles, which only the garbage collector would free
    self._recent.clear()
    self._root = _Node(np.zeros(0, np.int32), None)
    self.version = version

  def find(self, ids: np.ndarray) -> tuple[int, Entry] | None:
    """How many of ``ids``, up to all, can be taken from an entry, and the entry; the most found."""
    best: tuple[int, Entry] | None = None
    for depth, node, whole in self._walk(ids):
      if whole and node.entry is not None and self._serves(depth, len(ids), node.entry):
        best = depth, node.entry
      elif self._may_cut is not None and (part := self._part(depth, len(ids))):
        if best is None or part > best[0]:
          below = next((e for e in _entries(node) if self._gives(e, part)), None)
          best = best if below is None else (part, below)
    if best is not None:
      self._recent.move_to_end(best[1])
    return best

  def insert(self, ids: np.ndarray, entry: Entry) -> None:
    """Keeps a context of these ids, unless one as good is there."""
    if entry.snapshot.version != self.version or not len(ids):
      return
    *_, (depth, node, whole) = [(0, self._root, True), *self._walk(ids)]
    if not whole:
      node = self._split(node, depth - _start(node))
    if depth < len(ids):
      child = _Node(ids[depth:].copy(), node)
      node.children[int(ids[depth])] = child
      node = child
    if node.entry is not None:
      if node.entry.fresh or not entry.fresh:
        return
      del self._recent[node.entry]
    node.entry = entry
    self._recent[entry] = node

  def evict(self) -> bool:
    """Drops the longest unused entry; False if there is none."""
    if not self._recent:
      return False
    _, node = self._recent.popitem(last=False)
    node.entry = None
    while node.parent is not None and node.entry is None and not node.children:
      del node.parent.children[int(node.edge[0])]
      node = node.parent
    return True

  def _walk(self, ids: np.ndarray) -> Iterator[tuple[int, _Node, bool]]:
    """(ids matched, node, whether all of its edge matched) down the tree, without the root."""
    node, depth = self._root, 0
    while depth < len(ids) and int(ids[depth]) in node.children:
      node = node.children[int(ids[depth])]
      width = min(len(node.edge), len(ids) - depth)
      same = node.edge[:width] == ids[depth : depth + width]
      matched = width if same.all() else int(np.argmin(same))
      depth += matched
      yield depth, node, matched == len(node.edge)
      if matched < len(node.edge):
        return

  def _serves(self, depth: int, wanted: int, entry: Entry) -> bool:
    if self._any_history:
      return True
    return entry.fresh and (depth == wanted or depth % self._grid == 0)

  def _gives(self, entry: Entry, part: int) -> bool:
    """Whether the first ``part`` tokens can be had from an entry that goes on."""
    assert self._may_cut is not None
    return (entry.fresh or self._any_history) and self._may_cut(entry.snapshot, part)

  def _part(self, depth: int, wanted: int) -> int:
    """How many of ``depth`` common tokens a part of an entry gives: never the last wanted."""
    part = min(depth, wanted - 1)
    return part if self._any_history else part - part % self._grid

  def _split(self, node: _Node, width: int) -> _Node:
    """A new node ``width`` ids into the edge of ``node``."""
    parent = node.parent
    assert parent is not None
    middle = _Node(node.edge[:width], parent)
    parent.children[int(node.edge[0])] = middle
    node.edge, node.parent = node.edge[width:], middle
    middle.children[int(node.edge[0])] = node
    return middle


def _start(node: _Node) -> int:
  """Ids before the edge of a node."""
  above, parent = 0, node.parent
  while parent is not None:
    above, parent = above + len(parent.edge), parent.parent
  return above


def _entries(node: _Node) -> Iterator[Entry]:
  """Entries at or below a node."""
  stack = [node]
  while stack:
    node = stack.pop()
    if node.entry is not None:
      yield node.entry
    stack.extend(node.children.values())
