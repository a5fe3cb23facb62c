import unittest

from calendars import add_days, days_between, days_in_month, format_date, parse_date, weekday


class CalendarTest(unittest.TestCase):
  def test_rules(self):
    self.assertEqual(days_in_month(2023, 1), 31)
    self.assertEqual(weekday(2023, 6, 5), 0)

  def test_arithmetic(self):
    self.assertEqual(add_days((2023, 1, 10), 5), (2023, 1, 15))
    self.assertEqual(days_between((2023, 3, 1), (2023, 3, 11)), 10)

  def test_notation(self):
    self.assertEqual(parse_date("2023-05-17"), (2023, 5, 17))
    self.assertEqual(format_date((2023, 5, 17)), "2023-05-17")


if __name__ == "__main__":
  unittest.main()
