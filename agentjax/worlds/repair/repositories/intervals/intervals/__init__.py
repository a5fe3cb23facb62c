"""Sets of whole numbers as sorted, disjoint half-open intervals ``(start, end)``."""

from .algebra import gaps, intersect, subtract, union
from .measure import contains, longest, total_length
from .notation import format_ranges, parse_ranges

__all__ = [
  "contains",
  "format_ranges",
  "gaps",
  "intersect",
  "longest",
  "parse_ranges",
  "subtract",
  "total_length",
  "union",
]
