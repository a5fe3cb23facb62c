"""Counts."""


def histogram(values, width, low=0):
  """Counts of ``low .. low + width``, and so on to the largest value; smaller ones do not count."""
  counts: list[int] = []
  for value in values:
    if value < low:
      continue
    index = (value - low) // width
    while len(counts) <= index:
      counts.append(0)
    counts[index] += 1
  return counts


def crosstab(pairs):
  """How often each pair occurs: rows and columns in sorted order."""
  rows = sorted({row for row, _ in pairs})
  columns = sorted({column for _, column in pairs})
  table = [[0] * len(columns) for _ in rows]
  for row, column in pairs:
    table[rows.index(row)][columns.index(column)] += 1
  return rows, columns, table
