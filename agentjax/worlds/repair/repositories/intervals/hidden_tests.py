from intervals import (
  contains,
  format_ranges,
  gaps,
  intersect,
  longest,
  parse_ranges,
  subtract,
  total_length,
  union,
)


def test_union_of_touching_and_empty():
  assert union([(1, 3), (3, 5)]) == [(1, 5)]
  assert union([(4, 4), (1, 2)]) == [(1, 2)]
  assert union([]) == []
  assert union([(7, 6)]) == []


def test_union_of_nested():
  assert union([(1, 10), (2, 3), (12, 13)]) == [(1, 10), (12, 13)]


def test_union_keeps_neighbours_apart():
  assert union([(1, 3), (4, 5)]) == [(1, 3), (4, 5)]


def test_intersect_many():
  assert intersect([(0, 4), (6, 10)], [(2, 7), (9, 12)]) == [(2, 4), (6, 7), (9, 10)]


def test_intersect_of_touching_is_empty():
  assert intersect([(0, 4)], [(4, 8)]) == []


def test_intersect_equal_ends():
  assert intersect([(0, 4), (5, 8)], [(1, 4), (7, 8)]) == [(1, 4), (7, 8)]


def test_subtract():
  assert subtract([(0, 10)], [(2, 4), (6, 7)]) == [(0, 2), (4, 6), (7, 10)]
  assert subtract([(0, 3)], [(3, 5)]) == [(0, 3)]
  assert subtract([(2, 3)], [(0, 5)]) == []
  assert subtract([(2, 6)], [(0, 2), (5, 9)]) == [(2, 5)]


def test_gaps():
  assert gaps([(0, 2), (4, 6)], 0, 8) == [(2, 4), (6, 8)]
  assert gaps([], 1, 3) == [(1, 3)]


def test_total_length_counts_overlap_once():
  assert total_length([(0, 5), (3, 8)]) == 8
  assert total_length([]) == 0


def test_contains_edges():
  assert contains([(1, 3), (5, 7), (9, 11)], 1)
  assert not contains([(1, 3), (5, 7), (9, 11)], 3)
  assert contains([(1, 3), (5, 7), (9, 11)], 10)
  assert not contains([(1, 3), (5, 7), (9, 11)], 8)
  assert not contains([(1, 3)], 0)


def test_longest():
  assert longest([(0, 2), (5, 9), (20, 24)]) == (5, 9)
  assert longest([(0, 5), (7, 8)]) == (0, 5)
  assert longest([]) is None


def test_parse():
  assert parse_ranges("7, 1-3") == [(1, 4), (7, 8)]
  assert parse_ranges("") == []
  assert parse_ranges("4-4") == [(4, 5)]


def test_parse_backwards():
  raised = False
  try:
    parse_ranges("5-3")
  except ValueError:
    raised = True
  assert raised


def test_format():
  assert format_ranges([(1, 2), (4, 7)]) == "1,4-6"
  assert format_ranges([]) == ""
