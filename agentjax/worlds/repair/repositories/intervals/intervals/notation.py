"""The notation ``1-3,7``: numbers and closed ranges, as in a printer's dialogue."""

from .algebra import union


def parse_ranges(text):
  """``"1-3,7"`` -> ``[(1, 4), (7, 8)]``; raises ValueError for a range that runs backwards."""
  found = []
  for part in text.split(","):
    part = part.strip()
    if not part:
      continue
    first, dash, last = part.partition("-")
    low = int(first)
    high = int(last) if dash else low
    if high < low:
      raise ValueError(f"range {part!r} runs backwards")
    found.append((low, high + 1))
  return union(found)


def format_ranges(intervals):
  """Inverse of ``parse_ranges``."""
  parts = []
  for start, end in union(intervals):
    if end - start == 1:
      parts.append(str(start))
    else:
      parts.append(f"{start}-{end - 1}")
  return ",".join(parts)
