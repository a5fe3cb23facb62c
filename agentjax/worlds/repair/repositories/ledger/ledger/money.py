"""Amounts as text."""


def parse_money(text):
  """``"-1,234.5"`` -> ``-123450`` cents; raises ValueError for more than two decimals."""
  text = text.strip().replace(",", "")
  negative = text.startswith("-")
  whole, _, part = text.lstrip("-").partition(".")
  if len(part) > 2:
    raise ValueError("an amount has at most two decimals")
  cents = int(whole or "0") * 100 + int(part.ljust(2, "0"))
  return -cents if negative else cents


def format_money(cents):
  """Inverse of ``parse_money``, with commas between thousands."""
  sign = "-" if cents < 0 else ""
  whole, part = divmod(abs(cents), 100)
  return f"{sign}{whole:,}.{part:02d}"


def split_evenly(cents, people):
  """Shares that differ by at most a cent and sum to all of it; the first ones are larger."""
  if people < 1:
    raise ValueError("at least one person")
  share, left = divmod(cents, people)
  return [share + 1 if index < left else share for index in range(people)]
