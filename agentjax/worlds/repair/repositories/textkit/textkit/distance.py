"""How far two texts are apart."""


def edit_distance(left, right):
  """Fewest insertions, deletions and substitutions that turn one text into the other."""
  row = list(range(len(right) + 1))
  for i, a in enumerate(left, start=1):
    previous, row[0] = row[0], i
    for j, b in enumerate(right, start=1):
      cost = 0 if a == b else 1
      previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + cost)
  return row[-1]


def longest_common(left, right):
  """The longest text that occurs in both, the first of several in ``left``."""
  best = ""
  for start in range(len(left)):
    end = start + len(best) + 1
    while end <= len(left) and left[start:end] in right:
      best = left[start:end]
      end += 1
  return best
