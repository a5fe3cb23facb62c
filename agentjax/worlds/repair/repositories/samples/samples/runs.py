"""Figures that depend on the order in which values came."""

from .order import median


def moving_sum(values, width):
  """Sums of all windows of ``width`` neighbours."""
  if width < 1:
    raise ValueError("the width must be positive")
  return [sum(values[i : i + width]) for i in range(len(values) - width + 1)]


def longest_rise(values):
  """Length of the longest stretch in which each value exceeds the one before."""
  best = length = 0
  for index, value in enumerate(values):
    if index > 0 and value > values[index - 1]:
      length += 1
    else:
      length = 1
    best = max(best, length)
  return best


def outliers(values, factor=3):
  """Values further from the median than ``factor`` times the median of all such distances."""
  if not values:
    return []
  centre = median(values)
  spread = median([abs(value - centre) for value in values])
  return [value for value in values if abs(value - centre) > factor * spread]
