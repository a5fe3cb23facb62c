"""Lengths of months and years."""

_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
  """Every fourth year, but of the centuries every fourth only."""
  return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
  """28 to 31; raises ValueError for a month that is none."""
  if month < 1 or month > 12:
    raise ValueError(f"month {month}")
  if month == 2 and is_leap(year):
    return 29
  return _LENGTHS[month - 1]


def day_of_year(year, month, day):
  """1 for the first of January."""
  return sum(days_in_month(year, m) for m in range(1, month)) + day


def weekday(year, month, day):
  """0 for Monday to 6 for Sunday, by Zeller's congruence."""
  if month < 3:
    month += 12
    year -= 1
  century, rest = divmod(year, 100)
  zeller = day + 13 * (month + 1) // 5 + rest + rest // 4 + century // 4 + 5 * century
  return (zeller + 5) % 7
