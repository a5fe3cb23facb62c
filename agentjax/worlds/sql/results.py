"""Comparing the results of two SQL queries."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from agentjax.worlds.sql.statements import Cell

Row = tuple[Cell, ...]

_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]")
_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_WORD = re.compile(r"[()]|order\s+by\b", re.IGNORECASE)


def is_ordered(query: str) -> bool:
  """Whether a query has an ORDER BY of its own, not just one within a sub-query or a string."""
  depth = 0
  for token in _WORD.findall(_COMMENT.sub(" ", _QUOTED.sub("''", query))):
    if token == "(":
      depth += 1
    elif token == ")":
      depth -= 1
    elif depth == 0:
      return True
  return False


def results_match(
  gold: Sequence[Row],
  predicted: Sequence[Row],
  *,
  ordered: bool,
  any_column_order: bool = False,
  tolerance: float = 1e-6,
) -> bool:
  """Whether two results hold the same rows: as lists where ``ordered``, else as multisets.

  Numbers are equal within a relative ``tolerance`` whatever their type; a number never equals a
  text, and NULL equals NULL only. How many columns there are must be compared by the caller where
  both results may be empty.

  Args:
    gold, predicted: rows.
    ordered: whether the order of rows counts.
    any_column_order: also try the columns of ``predicted`` in every order that fits.
    tolerance: relative, and absolute around 0.
  """
  if len(gold) != len(predicted):
    return False
  if not gold:
    return True
  if len(gold[0]) != len(predicted[0]):
    return False
  if not any_column_order:
    return _rows_match(gold, predicted, ordered, tolerance)
  return any(
    _rows_match(gold, [tuple(row[i] for i in order) for row in predicted], ordered, tolerance)
    for order in _column_orders(gold, predicted, tolerance)
  )


def overlap(gold: Sequence[Row], predicted: Sequence[Row]) -> float:
  r"""How much of two results agrees, -1..1: the dense reward of InterCode (2306.14898).

  The multisets' ``|gold & predicted| / |gold | predicted|``, times Kendall's tau-b between the
  shared rows in the two orders, rows being compared by their texts; 1 where both are empty. With
  tau it is rounded to two decimals, and where tau is undefined (fewer than two different rows) it
  is left out, as in InterCode's code.
  """
  left, right = [repr(tuple(row)) for row in gold], [repr(tuple(row)) for row in predicted]
  gold_counts, predicted_counts = Counter(left), Counter(right)
  union = sum((gold_counts | predicted_counts).values())
  if union == 0:
    return 1.0
  shared = gold_counts & predicted_counts
  value = sum(shared.values()) / union
  tau = _kendall_tau(_only(right, shared), _only(left, shared))
  return value if tau is None else round(tau * value, 2)


def _rows_match(
  gold: Sequence[Row], predicted: Sequence[Row], ordered: bool, tolerance: float
) -> bool:
  if not ordered:
    gold, predicted = sorted(gold, key=_row_key), sorted(predicted, key=_row_key)
  return all(
    all(_cells_match(a, b, tolerance) for a, b in zip(left, right, strict=True))
    for left, right in zip(gold, predicted, strict=True)
  )


def _cells_match(left: Cell, right: Cell, tolerance: float) -> bool:
  if isinstance(left, int | float) and isinstance(right, int | float):
    return left == right or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
  return type(left) is type(right) and left == right


def _row_key(row: Row) -> tuple:
  return tuple(_cell_key(cell) for cell in row)


def _cell_key(cell: Cell) -> tuple:
  """Orders cells of all kinds; numbers that differ by rounding errors only get one key."""
  if cell is None:
    return (0, 0)
  if isinstance(cell, int | float):
    return (1, float(f"{cell:.6g}") if abs(cell) < 1e300 else math.copysign(math.inf, cell))
  return (2, cell) if isinstance(cell, str) else (3, cell)


def _column_orders(
  gold: Sequence[Row], predicted: Sequence[Row], tolerance: float
) -> Iterator[tuple[int, ...]]:
  """Orders of the predicted columns in which each column holds what the gold one holds."""
  width = len(gold[0])
  gold_columns = [[(row[i],) for row in gold] for i in range(width)]
  columns = [[(row[i],) for row in predicted] for i in range(width)]
  fits = [
    [j for j in range(width) if _rows_match(g, columns[j], False, tolerance)] for g in gold_columns
  ]

  def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(chosen) == width:
      yield chosen
      return
    for j in fits[len(chosen)]:
      if j not in chosen:
        yield from extend((*chosen, j))

  for count, order in enumerate(extend(())):
    if count == 1000:  # ours; many columns alike would give factorially many
      return
    yield order


def _only(rows: Sequence[str], shared: Counter[str]) -> list[str]:
  """The rows that are shared, in their order, each as often as it is shared."""
  left = Counter(shared)
  kept = []
  for row in rows:
    if left[row] > 0:
      left[row] -= 1
      kept.append(row)
  return kept


def _kendall_tau(left: Sequence[str], right: Sequence[str]) -> float | None:
  """Kendall's tau-b of two lists of texts; None where one of them is constant."""
  ranks = [
    np.unique(np.array(side, dtype=object), return_inverse=True)[1] for side in (left, right)
  ]
  concordant = ties_left = ties_right = pairs = 0
  for i in range(len(left) - 1):
    a, b = (np.sign(side[i + 1 :] - side[i]) for side in ranks)
    concordant += int((a * b).sum())
    ties_left += int((a == 0).sum())
    ties_right += int((b == 0).sum())
    pairs += len(a)
  scale = math.sqrt((pairs - ties_left) * (pairs - ties_right))
  return concordant / scale if scale else None
