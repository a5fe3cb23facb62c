"""Dates of the Gregorian calendar as (year, month, day)."""

from .arithmetic import add_days, add_months, days_between
from .notation import format_date, parse_date
from .rules import day_of_year, days_in_month, is_leap, weekday

__all__ = [
  "add_days",
  "add_months",
  "day_of_year",
  "days_between",
  "days_in_month",
  "format_date",
  "is_leap",
  "parse_date",
  "weekday",
]
