"""How large a set is, and what is in it."""

from .algebra import union


def total_length(intervals):
  """How many numbers the set holds."""
  return sum(end - start for start, end in union(intervals))


def contains(intervals, number):
  """Whether a number lies in the set, by bisection."""
  merged = union(intervals)
  low, high = 0, len(merged)
  while low < high:
    middle = (low + high) // 2
    start, end = merged[middle]
    if number < start:
      high = middle
    elif number >= end:
      low = middle + 1
    else:
      return True
  return False


def longest(intervals):
  """The longest interval of the set, the first of several; None for the empty set."""
  best = None
  for start, end in union(intervals):
    if best is None or end - start > best[1] - best[0]:
      best = (start, end)
  return best
