"""Dates some time away."""

from .rules import day_of_year, days_in_month, is_leap


def add_days(date, days):
  """The date so many days later, or earlier where ``days`` is negative."""
  year, month, day = date
  day += days
  while day > days_in_month(year, month):
    day -= days_in_month(year, month)
    month += 1
    if month > 12:
      year, month = year + 1, 1
  while day < 1:
    month -= 1
    if month < 1:
      year, month = year - 1, 12
    day += days_in_month(year, month)
  return (year, month, day)


def add_months(date, months):
  """The same day so many months later, or the last day of a month that is too short."""
  year, month, day = date
  years, index = divmod(month - 1 + months, 12)
  year, month = year + years, index + 1
  return (year, month, min(day, days_in_month(year, month)))


def days_between(first, second):
  """Days from the first date to the second; negative where it comes earlier."""
  if first > second:
    return -days_between(second, first)
  days = day_of_year(*second) - day_of_year(*first)
  for year in range(first[0], second[0]):
    days += 366 if is_leap(year) else 365
  return days
