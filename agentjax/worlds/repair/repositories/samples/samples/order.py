"""Figures that depend on order."""


def median(values):
  """The middle value; of an even number of values the mean of both middle ones."""
  if not values:
    raise ValueError("no values")
  ordered = sorted(values)
  middle = len(ordered) // 2
  if len(ordered) % 2 == 1:
    return ordered[middle]
  return (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values, percent):
  """The smallest value that at least so many percent of the values do not exceed."""
  ordered = sorted(values)
  index = -(-len(ordered) * percent // 100)
  return ordered[max(index, 1) - 1]


def mode(values):
  """The value that occurs most often, the smallest of several."""
  best = None
  for value in sorted(set(values)):
    if best is None or values.count(value) > values.count(best):
      best = value
  return best


def ranks(values):
  """1 for the smallest; equal values share the mean of their ranks."""
  result = []
  for value in values:
    smaller = sum(1 for other in values if other < value)
    equal = sum(1 for other in values if other == value)
    result.append(smaller + (equal + 1) / 2)
  return result
