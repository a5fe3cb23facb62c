"""Dates as text."""

from .rules import days_in_month


def parse_date(text):
  """``"2024-02-29"`` -> ``(2024, 2, 29)``; raises ValueError for a day that does not exist."""
  year, month, day = (int(part) for part in text.split("-"))
  if day < 1 or day > days_in_month(year, month):
    raise ValueError(f"{text} does not exist")
  return (year, month, day)


def format_date(date, order="ymd"):
  """``2024-02-29``; order "dmy" gives ``29.02.2024``."""
  year, month, day = date
  if order == "dmy":
    return f"{day:02d}.{month:02d}.{year:04d}"
  return f"{year:04d}-{month:02d}-{day:02d}"
