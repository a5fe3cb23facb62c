"""Figures of small samples, given as lists of whole numbers."""

from .order import median, mode, quantile, ranks
from .runs import longest_rise, moving_sum, outliers
from .tables import crosstab, histogram

__all__ = [
  "crosstab",
  "histogram",
  "longest_rise",
  "median",
  "mode",
  "moving_sum",
  "outliers",
  "quantile",
  "ranks",
]
