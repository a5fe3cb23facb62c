"""Union, intersection, difference and gaps."""


def union(intervals):
  """Merges intervals that overlap or touch; empty ones vanish."""
  merged: list[tuple[int, int]] = []
  for start, end in sorted(intervals):
    if start >= end:
      continue
    if merged and start <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((start, end))
  return merged


def intersect(left, right):
  """What lies in both of two sets."""
  left, right = union(left), union(right)
  found = []
  i = j = 0
  while i < len(left) and j < len(right):
    start = max(left[i][0], right[j][0])
    end = min(left[i][1], right[j][1])
    if start < end:
      found.append((start, end))
    if left[i][1] < right[j][1]:
      i += 1
    else:
      j += 1
  return found


def subtract(left, right):
  """What lies in the first set but not in the second."""
  kept = []
  for start, end in union(left):
    for other_start, other_end in union(right):
      if other_end <= start or other_start >= end:
        continue
      if other_start > start:
        kept.append((start, other_start))
      start = max(start, other_end)
    if start < end:
      kept.append((start, end))
  return kept


def gaps(intervals, low, high):
  """What of ``low .. high`` no interval covers."""
  return subtract([(low, high)], intervals)
