"""Documents that contexts may read as packets, and where they stand in a text."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

import numpy as np

# Documents are found by their first ids; shorter ones are read as text. Ours.
_FIRST = 8
_EDGE = 4  # ids at each end of a text that may depend on what is around it; ours
_AROUND = (("\n", "\n"), ("\n\n", "\n\n"), (" ", " "))


class Library:
  """Documents that contexts may read as packets.

  Attributes:
    documents: their ids.
  """

  def __init__(self, documents: Sequence[Sequence[int] | np.ndarray] = ()) -> None:
    self.documents: list[np.ndarray] = []
    self._by_first: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for ids in documents:
      self.add(ids)

  def add(self, token_ids: Sequence[int] | np.ndarray) -> None:
    """Adds a document; of two that begin alike, contexts read the longer one where it stands.

    Raises:
      ValueError: fewer than 8 ids.
    """
    ids = np.asarray(token_ids, np.int32)
    if len(ids) < _FIRST:
      raise ValueError(f"a document of {len(ids)} tokens; allowed: {_FIRST} or more.")
    alike = self._by_first[tuple(ids[:_FIRST].tolist())]
    alike.append(len(self.documents))
    self.documents.append(ids)
    alike.sort(key=lambda number: -len(self.documents[number]))

  def add_text(
    self, encode: Callable[[str], Sequence[int]], text: str, least_tokens: int = _FIRST
  ) -> bool:
    """Adds what of a text has the same ids wherever it stands; False if that is too short.

    Tokenizers merge characters across borders, so the ids at both ends of a text depend on what is
    around it. They are left out, up to 4 at each end, and read as text.
    """
    ids = steady_ids(encode, text)
    if len(ids) < max(_FIRST, least_tokens):
      return False
    self.add(ids)
    return True

  def split(self, token_ids: Sequence[int] | np.ndarray) -> Iterator[tuple[np.ndarray, int | None]]:
    """Parts of a text in order, with the number of the document that a part is, if it is one."""
    ids = np.asarray(token_ids, np.int32)
    begin = at = 0
    while at < len(ids):
      number = self._at(ids, at)
      if number is None:
        at += 1
        continue
      if at > begin:
        yield ids[begin:at], None
      begin = at = at + len(self.documents[number])
      yield self.documents[number], number
    if begin < len(ids):
      yield ids[begin:], None

  def _at(self, ids: np.ndarray, at: int) -> int | None:
    for number in self._by_first.get(tuple(ids[at : at + _FIRST].tolist()), ()):
      document = self.documents[number]
      if np.array_equal(ids[at : at + len(document)], document):
        return number
    return None


def steady_ids(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
  """The longest run of a text's ids that is the same between lines, blanks and on its own.

  At most 4 ids at each end are left out; empty if that is not enough.
  """
  alone = list(encode(text))
  around = [list(encode(f"{before}{text}{after}")) for before, after in _AROUND]
  for left_out in range(2 * _EDGE + 1):
    for first in range(max(0, left_out - _EDGE), min(left_out, _EDGE) + 1):
      part = alone[first : len(alone) - (left_out - first)]
      if part and all(_holds(ids, part) for ids in around):
        return part
  return []


def _holds(ids: list[int], part: list[int]) -> bool:
  return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))
