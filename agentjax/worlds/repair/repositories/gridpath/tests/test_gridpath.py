import unittest

from gridpath import areas, cells, distance, neighbours, parse, path, region


class GridTest(unittest.TestCase):
  def setUp(self):
    self.rows = parse("...\n.#.\n...")

  def test_reading(self):
    self.assertEqual(len(cells(self.rows)), 8)
    self.assertEqual(neighbours(self.rows, (0, 0)), [(0, 1), (1, 0)])

  def test_ways(self):
    self.assertEqual(distance(self.rows, (0, 0), (2, 2)), 4)
    self.assertEqual(len(path(self.rows, (0, 0), (2, 2))), 5)

  def test_pieces(self):
    self.assertEqual(region(self.rows, (0, 0)), 8)
    self.assertEqual(areas(self.rows), [8])


if __name__ == "__main__":
  unittest.main()
