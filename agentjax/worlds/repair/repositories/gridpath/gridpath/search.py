"""Shortest ways, breadth first."""

from .maze import neighbours


def _steps_from(rows, start):
  steps = {start: 0}
  queue = [start]
  while queue:
    place = queue.pop(0)
    for other in neighbours(rows, place):
      if other not in steps:
        steps[other] = steps[place] + 1
        queue.append(other)
  return steps


def distance(rows, start, goal):
  """Fewest steps between two places; -1 where there is no way."""
  return _steps_from(rows, start).get(goal, -1)


def path(rows, start, goal):
  """A shortest way with both its ends; empty where there is none."""
  steps = _steps_from(rows, goal)
  if start not in steps:
    return []
  way = [start]
  while way[-1] != goal:
    here = way[-1]
    for other in neighbours(rows, here):
      if steps[other] == steps[here] - 1:
        way.append(other)
        break
  return way
