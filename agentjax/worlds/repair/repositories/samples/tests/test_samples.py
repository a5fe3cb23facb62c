import unittest

from samples import histogram, longest_rise, median, mode, moving_sum, ranks


class SamplesTest(unittest.TestCase):
  def test_order(self):
    self.assertEqual(median([3, 1, 2]), 2)
    self.assertEqual(mode([1, 2, 2]), 2)
    self.assertEqual(ranks([10, 20, 30]), [1, 2, 3])

  def test_runs(self):
    self.assertEqual(moving_sum([1, 2, 3], 2), [3, 5])
    self.assertEqual(longest_rise([1, 2, 3]), 3)

  def test_tables(self):
    self.assertEqual(histogram([0, 1, 5], 5), [2, 1])


if __name__ == "__main__":
  unittest.main()
