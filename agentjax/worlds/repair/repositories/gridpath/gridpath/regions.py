"""Connected pieces of floor."""

from .maze import cells, neighbours


def region(rows, start):
  """How many places can be reached from one, itself included."""
  seen = {start}
  stack = [start]
  while stack:
    for other in neighbours(rows, stack.pop()):
      if other not in seen:
        seen.add(other)
        stack.append(other)
  return len(seen)


def areas(rows):
  """Sizes of all pieces of floor, the largest first."""
  left = set(cells(rows))
  sizes = []
  while left:
    stack = [min(left)]
    left.remove(stack[0])
    size = 0
    while stack:
      size += 1
      for other in neighbours(rows, stack.pop()):
        if other in left:
          left.remove(other)
          stack.append(other)
    sizes.append(size)
  return sorted(sizes, reverse=True)
