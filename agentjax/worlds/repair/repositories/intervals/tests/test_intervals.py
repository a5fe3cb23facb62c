import unittest

from intervals import contains, format_ranges, gaps, intersect, parse_ranges, total_length, union


class IntervalsTest(unittest.TestCase):
  def test_union(self):
    self.assertEqual(union([(5, 8), (1, 3)]), [(1, 3), (5, 8)])
    self.assertEqual(union([(1, 4), (2, 6)]), [(1, 6)])

  def test_intersect(self):
    self.assertEqual(intersect([(1, 5)], [(3, 9)]), [(3, 5)])

  def test_gaps(self):
    self.assertEqual(gaps([(2, 4)], 0, 6), [(0, 2), (4, 6)])

  def test_measure(self):
    self.assertEqual(total_length([(1, 4), (6, 8)]), 5)
    self.assertTrue(contains([(1, 4)], 2))
    self.assertFalse(contains([(1, 4)], 9))

  def test_notation(self):
    self.assertEqual(parse_ranges("1-3"), [(1, 4)])
    self.assertEqual(format_ranges([(1, 4)]), "1-3")


if __name__ == "__main__":
  unittest.main()
