from calendars import (
  add_days,
  add_months,
  day_of_year,
  days_between,
  days_in_month,
  format_date,
  is_leap,
  parse_date,
  weekday,
)


def test_leap_years():
  assert is_leap(2024)
  assert is_leap(2000)
  assert not is_leap(1900)
  assert not is_leap(2023)


def test_days_in_month():
  assert days_in_month(2024, 2) == 29
  assert days_in_month(2023, 2) == 28
  assert days_in_month(2023, 4) == 30
  assert days_in_month(2023, 12) == 31
  assert days_in_month(2024, 3) == 31


def test_no_such_month():
  refused = 0
  for month in (0, 13):
    try:
      days_in_month(2023, month)
    except ValueError:
      refused += 1
  assert refused == 2


def test_day_of_year():
  assert day_of_year(2023, 1, 1) == 1
  assert day_of_year(2023, 12, 31) == 365
  assert day_of_year(2024, 3, 1) == 61


def test_weekday():
  assert weekday(2000, 1, 1) == 5
  assert weekday(2024, 2, 29) == 3
  assert weekday(1999, 12, 31) == 4
  assert weekday(2023, 3, 1) == 2


def test_add_days():
  assert add_days((2023, 12, 31), 1) == (2024, 1, 1)
  assert add_days((2024, 2, 28), 1) == (2024, 2, 29)
  assert add_days((2023, 1, 31), 29) == (2023, 3, 1)
  assert add_days((2023, 11, 30), 31) == (2023, 12, 31)


def test_add_negative_days():
  assert add_days((2024, 1, 1), -1) == (2023, 12, 31)
  assert add_days((2024, 3, 1), -1) == (2024, 2, 29)
  assert add_days((2024, 3, 5), -5) == (2024, 2, 29)


def test_add_months():
  assert add_months((2024, 1, 31), 1) == (2024, 2, 29)
  assert add_months((2023, 11, 15), 3) == (2024, 2, 15)
  assert add_months((2023, 3, 31), -1) == (2023, 2, 28)
  assert add_months((2023, 5, 9), 7) == (2023, 12, 9)


def test_days_between():
  assert days_between((2023, 12, 31), (2024, 3, 1)) == 61
  assert days_between((2024, 3, 1), (2023, 12, 31)) == -61
  assert days_between((2000, 1, 1), (2001, 1, 1)) == 366
  assert days_between((2023, 5, 5), (2023, 5, 5)) == 0


def test_parse_date():
  assert parse_date("2024-02-29") == (2024, 2, 29)
  assert parse_date("0999-01-01") == (999, 1, 1)


def test_parse_refuses():
  refused = 0
  for text in ("2023-02-29", "2023-01-00", "2023-13-01"):
    try:
      parse_date(text)
    except ValueError:
      refused += 1
  assert refused == 3


def test_format_date():
  assert format_date((999, 1, 2)) == "0999-01-02"
  assert format_date((2024, 2, 9), "dmy") == "09.02.2024"
