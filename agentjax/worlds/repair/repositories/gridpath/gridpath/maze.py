"""Reading mazes."""

STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1))


def parse(text):
  """Rows of a maze; raises ValueError where they differ in length."""
  rows = [line.strip() for line in text.strip().splitlines()]
  if any(len(row) != len(rows[0]) for row in rows):
    raise ValueError("rows differ in length")
  return rows


def cells(rows, kind="."):
  """All places of a kind, row by row."""
  return [(r, c) for r in range(len(rows)) for c in range(len(rows[0])) if rows[r][c] == kind]


def neighbours(rows, place):
  """Floor next to a place: above, right, below, left."""
  found = []
  for down, right in STEPS:
    r, c = place[0] + down, place[1] + right
    if 0 <= r < len(rows) and 0 <= c < len(rows[0]) and rows[r][c] != "#":
      found.append((r, c))
  return found
